"""Tests who may ask the live page for what: foreign hosts, origins, paths, bodies are refused, and change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.web_protocol import RequestHandler

from omni_async.cli import main
from omni_async.commands.watch import app, command, guard, live, serve
from omni_async.commands.watch.actions import Asked
from omni_async.commands.watch.command import Once
from omni_async.commands.watch.guard import HEADERS, KEY_HEADER
from omni_async.rewards.server import connections
from omni_async.rewards.server.listener import address_of, listening
from tests.commands.watch.watch_world import TOKEN, Page, RunningJob, watched
from tests.support.loops import settle
from tests.support.made_run import MadeRun
from tests.support.patience import PATIENCE
from tests.support.ports import listening_at

STOP = {"action": "stop"}


async def raw(page: Page, request: bytes, received: Counter[int] | None = None, host: str = "127.0.0.1") -> bytes:
    """Sends bytes as they are, and returns the first line of the answer; empty if the connection is just closed.

    With `received`, the bytes that the server has of each port, the request need not be whole: if there is no answer
    although the server has all of it, it is cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port, local_addr=(host, 0))
    try:
        writer.write(request)
        answer, port = asyncio.create_task(reader.readline()), writer.get_extra_info("sockname")[1]
        async with asyncio.timeout(PATIENCE):
            while received is not None and not answer.done() and received[port] < len(request):  # noqa: ASYNC110
                await asyncio.sleep(0)  # the server is on this loop
            if received is not None and not answer.done():
                await settle()
                writer.write_eof()
            return await answer
    except ConnectionError:
        return b""
    finally:
        writer.close()


def untouched(job: RunningJob, page: Page) -> bool:
    return not job.asked and not job.stops and not (page.folder / "actions.jsonl").exists()


async def test_every_answer_has_the_headers_that_hold_a_browser_to_the_page(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        for path in ("/", "/page.js", "/api/report", "/samples/none.png", "/none", "/api/group/1"):
            async with page.client.get(f"{page.address}{path}") as response:
                assert HEADERS.items() <= dict(response.headers).items(), path
                assert "no-store" in response.headers["Cache-Control"]
                text = await response.text()
                assert page.key not in text
        assert "unsafe-inline" not in HEADERS["Content-Security-Policy"].replace("style-src-attr 'unsafe-inline'", "")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8710",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "user@localhost",
        "",
        "localhost/x",
        "[::1",
        "localhost:0",
        "localhost:99999",
    ],
)
async def test_a_foreign_host_is_refused(tmp_path: Path, host: str) -> None:
    async with watched(tmp_path) as page:
        for path in ("/", "/api/report", "/page.js"):
            line = await raw(page, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            assert line.split()[1] in (b"421", b"400"), line


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1234", "[::1]:8710", "10.1.2.3:8710", "LOCALHOST"])
async def test_localhost_at_any_port_and_addresses_pass_as_tunnels_send_them(tmp_path: Path, host: str) -> None:
    async with watched(tmp_path) as page:
        assert (await page.get("/", Host=host))[0] == 200


async def test_a_page_at_all_addresses_is_linked_by_its_machines_name_which_passes(tmp_path: Path) -> None:
    with listening("0.0.0.0", 0, "--port") as bound:
        link = urlsplit(address_of(bound))
        assert (link.hostname, link.port) == (socket.gethostname().lower(), bound.getsockname()[1])
    async with watched(tmp_path) as page:
        assert (await page.get("/", Host=link.netloc))[0] == 200


async def test_two_hosts_are_refused(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        line = await raw(page, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert line.split()[1] in (b"421", b"400")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost", "http://localhost:1", "http://127.0.0.1:1"]
)
async def test_a_foreign_origin_is_refused_whatever_it_asks(tmp_path: Path, origin: str) -> None:
    async with watched(tmp_path) as page, RunningJob(page.folder).answering() as job:
        assert (await page.get("/api/report", Origin=origin))[0] == 403
        assert (await page.post("/api/act", STOP, Origin=origin))[0] == 403
        assert untouched(job, page)


async def test_what_a_browser_says_comes_from_another_site_is_refused_except_a_link_to_the_page(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        cross = {"Sec-Fetch-Site": "cross-site"}
        assert (await page.get("/samples/train-000001.png", **cross, **{"Sec-Fetch-Mode": "no-cors"}))[0] == 403
        assert (await page.get("/events", **cross, **{"Sec-Fetch-Mode": "cors"}))[0] == 403
        assert (await page.get("/", **cross, **{"Sec-Fetch-Mode": "navigate"}))[0] == 200
        assert (await page.get("/api/report", **{"Sec-Fetch-Site": "same-origin"}))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": None}, 403),
        ({KEY_HEADER: None}, 403),
        ({KEY_HEADER: "x" * 43}, 403),
        ({KEY_HEADER: "é"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
    ],
    ids=str,
)
async def test_a_change_needs_the_pages_origin_its_key_and_json(
    tmp_path: Path, headers: dict[str, str | None], status: int
) -> None:
    async with watched(tmp_path) as page, RunningJob(page.folder).answering() as job:
        assert (await page.post("/api/act", STOP, **headers))[0] == status
        assert untouched(job, page)
        assert (await page.post("/api/act", STOP))[0] == 200 and job.stops == 1


@pytest.mark.parametrize(
    "body",
    [
        None, [], 1, "stop", {}, {"action": "kill"}, {"action": "stop", "now": True},
        {"action": "stop", "workers": {"rollout": 1}},
        {"action": "scale"}, {"action": "scale", "workers": {}}, {"action": "scale", "workers": {"rollout": 0}},
        {"action": "scale", "workers": {"rollout": 1.5}}, {"action": "scale", "workers": {"rollout": "2"}},
        {"action": "scale", "workers": {"rollout": 10**9}}, {"action": "scale", "workers": {"../x": 1}},
        {"action": "scale", "workers": {f"pool{'a' * n}": 1 for n in range(33)}},
        {"action": "scale", "workers": {"a" * 41: 1}},
        "x" * 20_000,
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
async def test_a_wrong_body_is_refused_and_changes_nothing(tmp_path: Path, body: object) -> None:
    async with watched(tmp_path) as page, RunningJob(page.folder).answering() as job:
        status, answer = await page.post("/api/act", body)
        assert status in (400, 413, 415) and set(answer) == {"error"}
        assert untouched(job, page)


@pytest.mark.parametrize(
    "path",
    [
        "/samples/../config.yaml", "/samples/..%2fconfig.yaml", "/samples/%2e%2e/config.yaml",
        "/samples/..\\config.yaml",
        "/samples/train-000001.png/../../config.yaml", "/../config.yaml", "//etc/passwd", "/samples//etc/passwd",
        "/samples/.lock", "/samples/train-000001.jsonl", "/samples/train-000001.png%00", "/vendor/../../file.py",
        "/samples/link-000001.png", "/samples/train-000009.png", "/samples/train-000008.png",
        "/samples/train-000007.png", "/samples/train-000006.png", "/samples/train-000005.png",
        "/page.js/", "/index.html",
    ],
)  # fmt: skip
async def test_no_path_leads_out_of_the_files_that_are_listed(tmp_path: Path, path: str) -> None:
    async with watched(tmp_path) as page:
        samples = page.folder / "samples"
        (samples / "train-000001.png").write_bytes(b"a picture")
        (samples / "train-000009.png").symlink_to(page.folder / "config.yaml")
        (samples / "train-000008.png").mkdir()
        (samples / "train-000007.png").symlink_to("/etc/passwd")
        os.mkfifo(samples / "train-000006.png")
        (samples / "train-000005.png").touch()
        os.truncate(samples / "train-000005.png", 2**26 + 1)
        line = await raw(page, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert line.split()[1] in (b"404", b"400"), line
        assert await page.get("/samples/train-000001.png") == (200, "a picture")


async def test_nothing_of_a_samples_folder_elsewhere_is_served(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        away = page.folder.with_name(f"{page.folder.name}-away")
        (page.folder / "samples").rename(away)
        (away / "train-000001.png").write_bytes(b"a picture")
        (page.folder / "samples").symlink_to(away)
        assert (await page.get("/samples/train-000001.png"))[0] == 404


# ---- the token -------------------------------------------------------------------------------------------------------


async def test_with_a_token_nothing_of_the_run_is_told_without_it(tmp_path: Path) -> None:
    async with watched(tmp_path, TOKEN) as page:
        status, text = await page.get("/")
        assert status == 401 and "login.js" in text and page.folder.name not in text
        for path in ("/api/report", "/events", "/api/group/1", "/samples/train-000001.png", "/api/window"):
            assert (await page.get(path))[0] == 401, path
        assert (await page.post("/api/act", STOP))[0] == 401
        assert (await page.get("/style.css"))[0] == 200  # what any reader of the project has
        assert (await page.get("/api/report", Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert (await page.get("/api/report", Authorization=f"Bearer {TOKEN}x"))[0] == 401


async def test_a_session_begins_with_the_token_and_its_cookie_is_for_this_page_alone(tmp_path: Path) -> None:
    async with watched(tmp_path, TOKEN) as page:
        assert (await page.post("/login", {"token": "wrong"}))[0] == 401
        assert (await page.post("/login", {"token": TOKEN}, Origin="http://evil.example"))[0] == 403
        assert (await page.get("/api/report"))[0] == 401
        async with page.client.post(f"{page.address}/login", json={"token": TOKEN}, headers=page.own) as response:
            assert await response.json() == {"key": page.key}
            cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        assert (await page.get("/api/report"))[0] == 200


@pytest.fixture
def slow_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives no further try while a test lasts, however long the machine stands still."""
    monkeypatch.setattr(guard, "_LOGINS_PER_S", 1e-6)


@pytest.mark.usefixtures("slow_tries")
async def test_tokens_cannot_be_tried_out_fast_and_the_right_one_still_passes(tmp_path: Path) -> None:
    async with watched(tmp_path, TOKEN) as page:
        statuses = [(await page.post("/login", {"token": f"wrong {n}"}))[0] for n in range(15)]
        assert statuses[:10] == [401] * 10 and 429 in statuses
        assert (await page.post("/login", {"token": TOKEN}))[0] == 200


@pytest.mark.usefixtures("slow_tries")
async def test_tokens_of_programs_cannot_be_tried_out_fast_and_the_right_one_is_no_try(tmp_path: Path) -> None:
    async with watched(tmp_path, TOKEN) as page:
        for _ in range(20):
            assert (await page.get("/api/report", Authorization=f"Bearer {TOKEN}"))[0] == 200
        statuses = [(await page.get("/api/report", Authorization=f"Bearer wrong {n}"))[0] for n in range(15)]
        assert statuses[:10] == [401] * 10 and 429 in statuses
        assert (await page.get("/api/report", Authorization=f"Bearer {TOKEN}"))[0] == 200


async def test_requests_without_the_token_use_up_nothing_of_those_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_PER_S", 1e-6)
    monkeypatch.setattr(guard, "_BURST", 3)
    async with watched(tmp_path, TOKEN) as page:
        assert [(await page.get("/api/report"))[0] for _ in range(5)] == [401] * 3 + [429] * 2
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert [(await page.get("/api/report", **known))[0] for _ in range(4)] == [200] * 3 + [429]


async def test_an_address_asks_so_often_and_tokens_are_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, secret: bytes) -> bool:
        compared.append(given)
        return given == secret

    monkeypatch.setattr(guard.hmac, "compare_digest", compare)
    monkeypatch.setattr(guard, "_PER_S", 1e-6)
    monkeypatch.setattr(guard, "_BURST", 4)
    async with watched(tmp_path, TOKEN) as page:
        await page.get("/", Authorization="Bearer x")
        await page.post("/login", {"token": "wrong"})
        await page.post("/login", {"token": TOKEN})
        await page.post("/api/act", STOP, **{KEY_HEADER: "wrong"})
        assert compared == [b"Bearer x", b"wrong", TOKEN.encode(), b"wrong"]
        statuses = [(await page.get("/api/report"))[0] for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2


async def test_more_connections_than_the_server_keeps_close_idle_ones_and_let_the_next_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MOST_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "_FRESH_S", 0.0)
    async with watched(tmp_path) as page:
        idle = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(8)]
        assert (await raw(page, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE):
            for reader, _ in idle[:6]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in idle:
            writer.close()


async def test_viewers_of_one_address_leave_room_for_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_MOST_CONNECTIONS", 8)
    async with watched(tmp_path) as page, contextlib.AsyncExitStack() as viewers:
        for _ in range(7):
            response = await viewers.enter_async_context(page.client.get(f"{page.address}/events"))
            assert (await response.content.readline()).startswith(b"data: ")
        question = b"GET /style.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert await raw(page, question) == b""
        assert (await raw(page, question, host="127.0.0.2")).startswith(b"HTTP/1.1 200")


async def test_a_viewer_that_takes_nothing_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_WRITE_S", 0.01)
    monkeypatch.setattr(live, "_MOST_VIEWERS", 1)

    async def stuck(self: object, data: bytes) -> None:
        await asyncio.Event().wait()

    async with watched(tmp_path) as page:
        with monkeypatch.context() as patched:
            patched.setattr("aiohttp.web.StreamResponse.write", stuck)
            async with page.client.get(f"{page.address}/events") as response:
                assert await response.read() == b""
        async with page.client.get(f"{page.address}/events") as response:
            assert response.status == 200 and (await response.content.readline()).startswith(b"data: ")


async def test_what_goes_wrong_in_an_answer_is_said_with_the_headers_of_all_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, group: int) -> None:
        raise RuntimeError("the ledger moved")

    monkeypatch.setattr("omni_async.records.read.follow.Follower.ledger_line", broken)
    async with watched(tmp_path) as page, page.client.get(f"{page.address}/api/group/1") as response:
        assert response.status == 500 and response.headers["Content-Security-Policy"]
        assert await response.json() == {"error": "RuntimeError: the ledger moved"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--token: required where --host = 0.0.0.0"),
        (["--host", "0.0.0.0", "--token", "secret"], "--token: expected env:NAME"),
        (["--host", "0.0.0.0", "--token", "env:NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--token", "env:SHORT_TOKEN"], "--token: expected 16 or more"),
        (["--port", "70000"], "--port: 70000"),
    ],
)
def test_a_listener_that_is_not_safe_is_refused_before_it_listens(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT_TOKEN", "short")
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["watch", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_it_listens_on_this_machine_alone_unless_it_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at: list[str] = []

    async def serving(*how: Any) -> int:
        async with serve.serving(*how) as (address, _):
            at.extend(listening_at(urlsplit(address).port or 0))
        return 0

    monkeypatch.setattr(command, "_serve", serving)
    MadeRun(groups=1).write(tmp_path)
    assert main(["watch", str(tmp_path), "--port", "0"]) == 0
    assert main(["watch", str(tmp_path), "--port", "0", "--host", "127.0.0.2"]) == 0
    assert at == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_the_printed_link_changes_the_run_and_with_a_token_the_token_alone_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    MadeRun(groups=1).write(tmp_path)
    ended, printed = asyncio.get_running_loop().create_future(), list[str]()
    monkeypatch.setattr("omni_async.rewards.server.listener.end_signal", lambda: ended)
    monkeypatch.setattr(command, "print_line", printed.append)
    serving = asyncio.create_task(command._serve(tmp_path, "127.0.0.1", 0, token))
    while not printed and not serving.done():  # noqa: ASYNC110 (the command prints when it listens)
        await asyncio.sleep(0)
    address, link, key = printed[0].rpartition(" ")[2].partition("/#")
    assert (link, len(key)) == (("/#", 43) if token is None else ("", 0))
    jar = aiohttp.CookieJar(unsafe=True)
    async with RunningJob(tmp_path).answering() as job, aiohttp.ClientSession(cookie_jar=jar) as client:
        page = Page(address, key, client, tmp_path)
        if token is not None:
            assert (await page.post("/api/act", STOP))[0] == 401 and not job.stops
            page.key = (await page.post("/login", {"token": token}))[1]["key"]
        assert (await page.post("/api/act", STOP))[0] == 200 and job.stops == 1
    ended.set_result(0)
    assert await serving == 0


def test_what_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2 and "there is no run in" in capsys.readouterr().err
    assert main(["watch", "nothing"]) == 2 and "nothing is not a run folder" in capsys.readouterr().err


# ---- anything ------------------------------------------------------------------------------------------------------

_METHODS = [*b"GET POST PUT DELETE OPTIONS HEAD TRACE PATCH CONNECT G\tET \xff\xfe".split(b" "), b""]
_PATHS = [
    *b"/ /api/act /login /events /api/window /api/report /api/group/99999999999 /api/group/x * /% /\xff".split(b" "),
    b"/api/window?from=nan&to=1e400&first=-1&last=9&columns=0",
    b"/api/window?from=0&to=1&first=0&last=9&columns=99999999",
    b"/samples/..%2f..%2fetc%2fpasswd",
    b"/samples/" + b"a" * 3000,
    b"http://evil.example/",
    b"/api/act?x=1#y",
]
_HEADERS = [
    *(b"Host: localhost", b"Host: evil.example", b"Host:", b"Origin: http://localhost", b"Origin: null"),
    *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 3"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Type: application/json"),
    *(b"Content-Type: " + b"x" * 5000, b"X: \x00", b"\xff: y", b"no colon", b" folded", b"Connection: close"),
    *(b"X-Omni-Async-Key: " + b"k" * 43, b"Authorization: Bearer \xe9", b"Cookie: omni_async_watch_80=" + b"z" * 100),
    *(b"Expect: 100-continue", b"Upgrade: websocket", b"Range: bytes=0-0,-1,5-"),
]
_BODIES = [
    *(b"", b"{}", b'{"action":"stop"}', b"[" * 2000, b"\xff\xfe\x00", b"0" * 20_000, b'5\r\n{"a"\r\n'),
    b'{"action":"scale","workers":{"rollout":1e99}}',
]
_STATUSES = {200, 100, 400, 401, 403, 404, 405, 411, 413, 415, 417, 421, 501, 505}


def malformed(rng: random.Random) -> bytes:
    """Makes a request that is wrong in some way, and never has the key of the page."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 300))
    lines = [
        b" ".join([rng.choice(_METHODS), rng.choice(_PATHS), rng.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9", b""])])
    ]
    lines += rng.sample(_HEADERS, rng.randrange(0, 6))
    made = b"\r\n".join(lines) + b"\r\n\r\n" + rng.choice(_BODIES)
    if rng.random() < 0.2:
        place = rng.randrange(len(made))
        made = made[:place] + rng.randbytes(rng.randrange(1, 5)) + made[place + rng.randrange(5) :]
    return made


@pytest.mark.parametrize("requests", [500, pytest.param(5000, marks=pytest.mark.thorough)])
async def test_malformed_requests_are_refused_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    monkeypatch.setattr(guard, "_PER_S", 1e6)  # so that every one is looked at
    monkeypatch.setattr(guard, "_BURST", 10**6)
    received: Counter[int] = Counter()
    former = RequestHandler.data_received

    def data_received(self: RequestHandler[Any], data: bytes) -> None:
        assert self.transport is not None
        received[self.transport.get_extra_info("peername")[1]] += len(data)
        former(self, data)

    monkeypatch.setattr(RequestHandler, "data_received", data_received)
    rng = random.Random(20261124)
    async with watched(tmp_path) as page, RunningJob(page.folder).answering() as job:
        before = {path: path.read_bytes() for path in page.folder.rglob("*") if path.is_file()}
        answers: Counter[int] = Counter()  # 0: the connection was closed

        async def some(number: int) -> None:
            for _ in range(number):
                words = (await raw(page, malformed(rng), received)).split()
                answers[int(words[1]) if len(words) > 1 else 0] += 1

        await asyncio.gather(*(some(requests // 25) for _ in range(25)))
        # Some are no more than unusual: a plain question for the page.
        assert answers.total() == requests and {*answers} <= {0, *_STATUSES}, answers
        assert sum(count for status, count in answers.items() if 400 <= status < 500) > 0.4 * requests, answers
        assert untouched(job, page)
        assert {path: path.read_bytes() for path in before} == before
        assert (await page.get("/api/report"))[0] == 200


def test_a_message_that_strangers_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger, once = logging.getLogger("tests.once"), Once("too many")
    logger.addFilter(once)
    for text in ("too many 1", "other", "too many 2", "other"):
        logger.error(text)
    logger.removeFilter(once)
    assert caplog.messages == ["too many 1", "other", "other"]


def test_scale_and_stop_are_told_apart() -> None:
    with pytest.raises(ValueError, match="scale needs workers"):
        Asked("scale")
