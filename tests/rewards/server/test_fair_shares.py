"""Tests that no client keeps others from a reward server: bodies, connections, places and requests are shared out."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from omni_async.config.schema import Reward
from omni_async.rewards import wire
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.scorers import model_servers
from omni_async.rewards.server import connections, server
from omni_async.rewards.server.connections import listen
from omni_async.rewards.server.limits import Room, client_of
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import NotNow, Scoring
from omni_async.types import Prompt
from tests.rewards.server.serving_world import HELD, MEDIA, Held, Recorder, asking, served, write_scorers
from tests.rewards.server.serving_world import held as held_scorer
from tests.rewards.server.test_serve_reward import TOKEN, ask, request_of, sample
from tests.support.loops import settle
from tests.support.patience import PATIENCE, wait_for

LARGE = 2**28  # server.max_request


def begun(
    url: str, length: int, body: bytes = b"", address: str = "127.0.0.1", path: str = wire.PATH, **headers: str
) -> socket.socket:
    """Returns a connection that has sent the head of a request and `body`, but not all of it."""
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None
    connection = socket.create_connection((where.hostname, where.port), PATIENCE, (address, 0))
    lines = {"Host": "x", "Content-Type": wire.MSGPACK, "Content-Length": str(length)} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return connection


@contextlib.contextmanager
def beginning(url: str, number: int, length: int, **how: Any) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(begun(url, length, **how))) for _ in range(number)]


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1000])
def test_clients_that_send_no_body_hold_nothing_and_keep_nobody_out(tmp_path: Path, sent: int) -> None:
    with served(write_scorers(tmp_path)) as url, beginning(url, 6, LARGE, body=b"x" * sent):
        assert ask(url, request_of(sample()))[0] == 200
        assert b"omni_async_reward_held_bytes 0.0" in ask(url, method="GET", path="/metrics")[2]


def test_a_body_that_stops_loses_its_place_and_others_of_its_size_are_read(tmp_path: Path) -> None:
    limits = {"max_request": "1MiB", "max_held": "1MiB", "read_s": 0.6}
    path = write_scorers(tmp_path, **limits)
    with served(path) as url, beginning(url, 2, 2**20, body=b"x" * 100_000) as stuck:
        assert ask(url, bytes(2**20))[0] == 400, "it was read, and is no request"
        for one in stuck:
            answer = one.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 408 ") and b"100000 of 1048576 bytes came in" in answer


def test_a_small_body_needs_no_place_and_one_that_stops_loses_its_own_when_another_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SHORT_LAG", 0.0)
    path = write_scorers(tmp_path, max_held="1KiB", read_s=10 * PATIENCE)
    with served(path) as url, beginning(url, 1, LARGE, body=b"x" * 70_000) as stuck:
        held_bytes = b"omni_async_reward_held_bytes 2.68435456e+08"
        wait_for(lambda: held_bytes in ask(url, method="GET", path="/metrics")[2], "the body to be held")
        assert ask(url, request_of(sample()))[0] == 200
        assert not select.select(stuck, [], [], 0)[0], "nobody waits: it may still arrive"
        assert ask(url, bytes(2**20))[0] == 400, "it was read, and is no request"
        assert stuck[0].recv(2**16).startswith(b"HTTP/1.1 408 ")


async def test_the_smallest_body_of_a_client_is_first_and_who_keeps_it_out_is_known() -> None:
    room, waits = Room(100), list[int]()
    room.began_to_wait = lambda: waits.append(1)
    await room.take("a", 50)
    large, small = [asyncio.create_task(room.take("a", nbytes)) for nbytes in (50, 10)]
    await asyncio.sleep(0)
    assert len(waits) == 2 and room.blocks("a") and not room.blocks("b"), "b's bodies do not keep a's out"
    await room.take("b", 60)
    assert room.blocks("b"), "now they do"
    assert room.fits_more("c", -10) and not room.fits_more("b", 1)
    room.give_back("a", 50)
    room.give_back("b", 60)
    await small
    assert not large.done()
    room.give_back("a", 10)
    await large
    assert room.fits_more("a", 1000), "there is nobody else"


def test_texts_are_held_as_what_they_take(tmp_path: Path) -> None:
    texts = {"x": "\U0001f600" + "x" * 100_000, "y": "y" * 100_000}
    body = request_of(wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata=texts), None))
    path = write_scorers(tmp_path, HELD)
    with served(path) as url, ThreadPoolExecutor(1) as pool:
        with held_scorer():
            asked = pool.submit(ask, url, body)
            assert Held.begun.wait(PATIENCE)
            line = f"omni_async_reward_held_bytes {len(body) + 3 * 100_004 + 3 * 64}.0\n"
            assert line.encode() in ask(url, method="GET", path="/metrics")[2]
        assert asked.result()[0] == 200


def test_texts_that_take_more_than_there_is_room_for_come_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_NARROW", 0)
    wide = wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata={"x": "é" * 50_000}), None)
    body = request_of(wide)
    with served(write_scorers(tmp_path, max_held="300KiB")) as url:
        assert ask(url, body)[0] == 200, "nobody else holds anything"
        with beginning(url, 1, 2**17, body=b"x" * 70_000, address="127.0.0.2"):
            held_bytes = b"omni_async_reward_held_bytes 131072.0"
            wait_for(lambda: held_bytes in ask(url, method="GET", path="/metrics")[2], "another body to be held")
            status, headers, answer = ask(url, body)
            assert (status, headers["Retry-After"]) == (503, "1") and b"no room for the texts" in answer


def test_requests_of_one_client_that_wait_for_room_are_bounded(tmp_path: Path) -> None:
    with served(write_scorers(tmp_path, max_request="1MiB", max_held="1KiB", max_connections=6)) as url:
        held_bytes = b"omni_async_reward_held_bytes 1.048576e+06"
        with beginning(url, 1, 2**20, body=b"x" * 100_000):
            wait_for(lambda: held_bytes in ask(url, method="GET", path="/metrics")[2], "the first body to be held")
            with beginning(url, 4, 2**20, body=b"x" * 100_000) as waiting:
                readable, _, _ = select.select(waiting, [], [], PATIENCE)
                assert readable[0].recv(2**16).startswith(b"HTTP/1.1 503 ")


def test_values_of_metadata_are_held_as_what_they_take(tmp_path: Path) -> None:
    many = wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata={"x": [{"y": None}] * 5000}), None)
    body = request_of(many)
    path = write_scorers(tmp_path, HELD)
    with served(path) as url, ThreadPoolExecutor(1) as pool:
        with held_scorer():
            asked = pool.submit(ask, url, body)
            assert Held.begun.wait(PATIENCE)
            line = f"omni_async_reward_held_bytes {len(body) + 64 * 10_002}.0\n"
            assert line.encode() in ask(url, method="GET", path="/metrics")[2]
        assert asked.result()[0] == 200
        wait_for(
            lambda: b"omni_async_reward_held_bytes 0.0" in ask(url, method="GET", path="/metrics")[2], "its release"
        )


async def test_the_client_that_holds_least_is_next_and_one_client_holds_half() -> None:
    room, order = Room(100), list[str]()

    async def take(client: str, nbytes: int) -> None:
        await room.take(client, nbytes)
        order.append(f"{client}{nbytes}")

    await take("a", 50)
    waiting = [asyncio.create_task(take(*one)) for one in (("a", 40), ("a", 30), ("b", 50), ("b", 20), ("c", 10))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a50", "b50"] and room.held == 100
    waiting[1].cancel()
    room.give_back("b", 50)
    await asyncio.gather(*waiting[3:])
    assert order[2:] == ["b20", "c10"]
    room.give_back("a", 50)
    await waiting[0]
    assert room.held == 70
    for client, nbytes in (("a", 40), ("b", 20), ("c", 10)):
        room.give_back(client, nbytes)
    await take("b", 1000)  # one body of any size
    late = asyncio.create_task(take("c", 1))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    room.give_back("b", 1000)
    assert room.held == 0


async def test_who_is_admitted_and_cancelled_at_once_gives_its_room_back() -> None:
    room = Room(10)
    await room.take("a", 10)
    late = asyncio.create_task(room.take("b", 10))
    await asyncio.sleep(0)
    room.give_back("a", 10)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert room.held == 0


def test_a_large_message_is_decoded_beside_the_event_loop_and_a_small_one_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_DECODED_HERE", 1000)
    monkeypatch.setattr(model_servers, "_READ_HERE", 200)
    threads: dict[str, list[threading.Thread]] = {"request": [], "answer": []}

    def noted(name: str, decode: Any) -> Any:
        def call(body: bytes, form: str) -> Any:
            threads[name].append(threading.current_thread())
            return decode(body, form)

        return call

    for name in threads:
        monkeypatch.setattr(wire, f"decode_{name}", noted(name, getattr(wire, f"decode_{name}")))
    with served(write_scorers(tmp_path)) as url, asking(url, form="json") as scorer:
        for number in (1, 4):
            scorer.score(MEDIA[:1] * number, [Prompt(i, f"{i}") for i in range(number)])
    for used in threads.values():
        assert [thread.name == "blocking call" for thread in used] == [False, True]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (None, ""),
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
    ],
)
def test_a_network_of_one_machine_is_one_client(address: str | None, client: str) -> None:
    assert client_of(address) == client


# ---- requests --------------------------------------------------------------------------------------------------------


def test_requests_without_the_token_use_up_nothing_of_those_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    path = write_scorers(tmp_path, token="env:SERVE_TOKEN", requests_per_s=1e-6, burst=3)
    with served(path) as url:
        statuses = [ask(url, b"x", Authorization=f"Bearer {TOKEN}{i}")[0] for i in range(5)]
        assert statuses == [401] * 3 + [429] * 2
        assert [ask(url, method="GET", path="/health")[0] for _ in range(5)] == [200] * 5
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert [ask(url, request_of(sample()), **known)[0] for _ in range(4)] == [200] * 3 + [429]


def test_the_token_is_looked_at_before_the_body_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    with (
        served(write_scorers(tmp_path, token="env:SERVE_TOKEN")) as url,
        contextlib.closing(begun(url, LARGE, Authorization="Bearer wrong")) as stranger,
    ):
        assert stranger.recv(2**16).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("path", "token", "expect", "first"),
    [
        (wire.PATH, "wrong", "100-continue", b"401"),
        (wire.PATH, "wrong", "foo", b"401"),
        ("/none", "wrong", "100-continue", b"401"),
        ("/none", TOKEN, "100-continue", b"404"),
        ("/health", TOKEN, "100-Continue", b"405"),
        (wire.PATH, TOKEN, "foo", b"200"),
        (wire.PATH, TOKEN, "100-Continue", b"100"),
    ],
)
def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_after_everything_else_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, token: str, expect: str, first: bytes
) -> None:
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    body = request_of(sample())
    headers = {"Authorization": f"Bearer {token}", "Expect": expect, "Connection": "close"}
    with (
        served(write_scorers(tmp_path, token="env:SERVE_TOKEN")) as url,
        contextlib.closing(begun(url, len(body), path=path, **headers)) as client,
    ):
        if first == b"200":
            client.sendall(body)
        answer = client.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 " + first)
        if first == b"100":
            client.sendall(body)
            assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")


# ---- samples ---------------------------------------------------------------------------------------------------------


async def test_clients_take_turns_and_one_has_half_of_the_places() -> None:
    scoring = Scoring(Reward(), [LoadedReward.of(Reward(), Recorder())], Metrics(), print, most_waiting=8, remembered=0)
    scoring.failed = asyncio.get_running_loop().create_future()

    def samples(name: str, number: int) -> list[tuple[str | None, Any, Prompt]]:
        return [(None, MEDIA[0], Prompt(i, f"{name}{i}")) for i in range(number)]

    asked = [asyncio.create_task(scoring.score(samples(name, n), name)) for name, n in (("a", 3), ("b", 1), ("c", 2))]
    await asyncio.sleep(0)
    with pytest.raises(NotNow, match="3 samples of this client wait already"):
        await scoring.score(samples("a", 2), "a")
    with pytest.raises(NotNow, match="6 samples wait already"):
        await scoring.score(samples("d", 3), "d")
    assert [job.prompt.text for job in scoring._take(4)] == ["a0", "b0", "c0", "a1"]
    assert [job.prompt.text for job in scoring._take(9)] == ["c1", "a2"] and scoring._num_waiting() == 0
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


# ---- connections -----------------------------------------------------------------------------------------------------


class Site:
    """A page that answers at once, or at `/held` when `free` is set."""

    def __init__(self, port: int, free: asyncio.Event, arrived: asyncio.Semaphore) -> None:
        self.port, self.free, self.arrived = port, free, arrived

    async def open(self, address: str = "127.0.0.1", path: str = "/") -> Visitor:
        visitor = await self.connect(address)
        visitor.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        if path == "/":
            await visitor.answer()
        return visitor

    async def connect(self, address: str = "127.0.0.1") -> Visitor:
        """Returns a connection that has sent nothing; the server has seen it."""
        visitor = Visitor(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0)))
        await settle()
        return visitor


class Visitor:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def answer(self) -> bytes:
        """Returns the body of an answer; empty if the connection has ended."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._reader.readuntil(b"\r\n\r\n")
                return await self._reader.readexactly(2)
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""

    async def ask(self) -> bytes:
        self.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await self.answer()


@contextlib.asynccontextmanager
async def site(most: int, idle_s: float = PATIENCE) -> AsyncIterator[Site]:
    free, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/held":
            arrived.release()
            await free.wait()
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, keepalive_timeout=idle_s, shutdown_timeout=0.01)
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0))
    accepting = await listen(runner, bound, most, idle_s)
    try:
        yield Site(bound.getsockname()[1], free, arrived)
    finally:
        accepting.close()
        await runner.cleanup()


async def held(page: Site, address: str = "127.0.0.1") -> Visitor:
    visitor = await page.open(address, "/held")
    await page.arrived.acquire()
    return visitor


async def test_the_longest_idle_connection_makes_room_for_a_new_one() -> None:
    async with site(6) as page:
        first, second, third, fourth = [await page.open(f"127.0.0.{i}") for i in (1, 1, 2, 5)]
        busy = [await held(page, "127.0.0.1"), await held(page, "127.0.0.3")]
        assert await first.ask() == b"ok"
        late = await page.open("127.0.0.4")
        page.free.set()
        assert [await one.ask() for one in (second, first, third, fourth, late)] == [b"", *[b"ok"] * 4]
        assert [await one.answer() for one in busy] == [b"ok"] * 2


async def test_an_address_leaves_an_eighth_of_the_connections_to_others_and_no_request_is_ended_for_a_new_one() -> None:
    async with site(8) as page:
        busy = [await held(page) for _ in range(7)]
        refused = [await page.open(path="/x")]
        busy.append(await held(page, "127.0.0.2"))
        refused.append(await page.open("127.0.0.3", "/x"))
        assert [await one.answer() for one in refused] == [b"", b""]
        page.free.set()
        assert [await one.answer() for one in busy] == [b"ok"] * 8


async def test_silent_connections_of_many_addresses_end_neither_requests_nor_idle_ones_and_keep_nobody_out() -> None:
    async with site(16) as page:
        idle, busy = [await page.open() for _ in range(3)], [await held(page) for _ in range(4)]
        silent = [await page.connect(f"127.0.1.{i}") for i in range(30)]
        busy.append(await held(page, "127.0.0.2"))
        page.free.set()
        assert [await one.ask() for one in idle] == [b"ok"] * 3 and [await one.answer() for one in busy] == [b"ok"] * 5
        assert await silent[0].answer() == b""


async def test_new_connections_of_one_address_that_never_ask_do_not_keep_it_out() -> None:
    async with site(8) as page:
        silent = [await page.connect() for _ in range(20)]
        assert await (await page.open()).ask() == b"ok" and await silent[0].answer() == b""


async def test_a_new_connection_makes_no_room_before_it_has_asked() -> None:
    async with site(4) as page:
        opened = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(4)]
        assert [await Visitor(*one).ask() for one in opened] == [b"ok"] * 4


async def test_one_address_keeps_half_of_the_connections_idle() -> None:
    async with site(8) as page:
        visitors = [await page.open() for _ in range(6)]
        assert [await one.ask() for one in visitors] == [b"", b""] + [b"ok"] * 4


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
async def test_a_connection_that_asks_for_nothing_is_closed(head: bytes) -> None:
    async with site(8, idle_s=0.05) as page:
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        writer.write(head)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**16):
                    pass
        writer.close()


def test_a_process_that_may_open_few_files_has_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (64, 64))
    handled: Any = type("Server", (), {"request_handler": None, "request_factory": None})()
    assert connections.Connections(handled, 1000)._most == 48
    assert connections.Connections(handled, 10)._most == 10
