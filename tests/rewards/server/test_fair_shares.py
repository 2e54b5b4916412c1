"""Tests that no client keeps others from a reward server: bodies, connections, places and requests are shared out."""

import asyncio
import contextlib
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from omni_async.config.reward import Reward
from omni_async.rewards import wire
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.scorers import model_servers
from omni_async.rewards.server import connections, server
from omni_async.rewards.server.connections import listen
from omni_async.rewards.server.limits import Room, client_of
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import NotNow, Scoring
from omni_async.types import Prompt
from tests.rewards.server.serving_world import (
    HELD,
    MEDIA,
    TOKEN,
    Held,
    Recorder,
    ask,
    held,
    measured,
    request_of,
    sample,
)
from tests.support.loops import settle
from tests.support.patience import PATIENCE, wait_for

LARGE = 2**28  # server.max_request


@pytest.fixture
def begin():
    """`begin(url, length, ...)`: a connection that has sent the head of a request and `body`, but not all of it."""
    with contextlib.ExitStack() as stack:

        def start(url, length, body=b"", address="127.0.0.1", path=wire.PATH, **headers):
            where = urlsplit(url)
            opened = socket.create_connection((where.hostname, where.port), PATIENCE, (address, 0))
            connection = stack.enter_context(contextlib.closing(opened))
            lines = {"Host": "x", "Content-Type": wire.MSGPACK, "Content-Length": str(length)} | headers
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            return connection

        yield start


def holds(url, nbytes):
    wait_for(lambda: measured(url, f"held_bytes {nbytes}"), f"{nbytes} held bytes")


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 1000])
def test_clients_that_send_no_body_hold_nothing_and_keep_nobody_out(serve, begin, sent):
    url = serve()
    for _ in range(6):
        begin(url, LARGE, b"x" * sent)
    assert ask(url, request_of(sample()))[0] == 200 and measured(url, "held_bytes 0.0")


def test_a_body_that_stops_loses_its_place_and_others_of_its_size_are_read(serve, begin):
    url = serve(max_request="1MiB", max_held="1MiB", read_s=0.6)
    stuck = [begin(url, 2**20, b"x" * 100_000) for _ in range(2)]
    assert ask(url, bytes(2**20))[0] == 400, "it was read, and is no request"
    for one in stuck:
        answer = one.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.6 s" in answer and b"100000 of 1048576 bytes came in" in answer


def test_a_small_body_needs_no_place_and_one_that_stops_loses_its_own_when_another_waits(serve, begin, monkeypatch):
    monkeypatch.setattr(server, "_SHORT_LAG", 0.0)
    url = serve(max_held="1KiB", read_s=10 * PATIENCE)
    stuck = begin(url, LARGE, b"x" * 70_000)
    holds(url, "2.68435456e+08")
    assert ask(url, request_of(sample()))[0] == 200
    assert not select.select([stuck], [], [], 0)[0], "nobody waits: it may still arrive"
    assert ask(url, bytes(2**20))[0] == 400, "it was read, and is no request"
    assert stuck.recv(2**16).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("metadata", "extra"),
    [
        ({"x": "\U0001f600" + "x" * 100_000, "y": "y" * 100_000}, 3 * 100_004 + 3 * 64),
        ({"x": [{"y": None}] * 5000}, 64 * 10_002),
    ],
    ids=["texts", "values"],
)
def test_metadata_are_held_as_what_they_take(serve, metadata, extra):
    body = request_of(wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata=metadata), None))
    url = serve(HELD)
    with ThreadPoolExecutor(1) as pool:
        with held():
            asked = pool.submit(ask, url, body)
            assert Held.begun.wait(PATIENCE)
            assert measured(url, f"held_bytes {len(body) + extra}.0")
        assert asked.result()[0] == 200
    holds(url, "0.0")


def test_texts_that_take_more_than_there_is_room_for_come_back_later(serve, begin, monkeypatch):
    monkeypatch.setattr(server, "_NARROW", 0)
    body = request_of(wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata={"x": "é" * 50_000}), None))
    url = serve(max_held="300KiB")
    assert ask(url, body)[0] == 200, "nobody else holds anything"
    begin(url, 2**17, b"x" * 70_000, address="127.0.0.2")
    holds(url, "131072.0")
    status, headers, answer = ask(url, body)
    assert (status, headers["Retry-After"]) == (503, "1") and b"no room for the texts" in answer


def test_requests_of_one_client_that_wait_for_room_are_bounded(serve, begin):
    url = serve(max_request="1MiB", max_held="1KiB", max_connections=6)
    begin(url, 2**20, b"x" * 100_000)
    holds(url, "1.048576e+06")
    readable, _, _ = select.select([begin(url, 2**20, b"x" * 100_000) for _ in range(4)], [], [], PATIENCE)
    assert readable[0].recv(2**16).startswith(b"HTTP/1.1 503 ")


async def test_the_smallest_body_of_a_client_is_first_and_who_keeps_it_out_is_known():
    room, waits = Room(100), []
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


async def test_the_client_that_holds_least_is_next_and_one_client_holds_half():
    room, order = Room(100), []

    async def take(client, nbytes):
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


@pytest.mark.parametrize("admitted", [False, True])
async def test_who_is_cancelled_while_it_waits_or_as_it_is_admitted_gives_its_room_back(admitted):
    room = Room(100)
    await room.take("a", 1000)  # one body of any size
    late = asyncio.create_task(room.take("b", 10))
    await asyncio.sleep(0)
    if admitted:
        room.give_back("a", 1000)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    if not admitted:
        room.give_back("a", 1000)
    assert room.held == 0


def test_a_large_message_is_decoded_beside_the_event_loop_and_a_small_one_on_it(serve, client, monkeypatch):
    monkeypatch.setattr(server, "_DECODED_HERE", 1000)
    monkeypatch.setattr(model_servers, "_READ_HERE", 200)
    threads = {"request": [], "answer": []}

    def noted(name, decode):
        def call(body, form):
            threads[name].append(threading.current_thread())
            return decode(body, form)

        return call

    for name in threads:
        monkeypatch.setattr(wire, f"decode_{name}", noted(name, getattr(wire, f"decode_{name}")))
    score = client(serve(), form="json")
    for number in (1, 4):
        score(MEDIA[:1] * number, [Prompt(i, f"{i}") for i in range(number)])
    for used in threads.values():
        assert [thread.name == "blocking call" for thread in used] == [False, True]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (None, ""),
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
    ],
)
def test_a_network_of_one_machine_is_one_client(address, client):
    assert client_of(address) == client


# ---- requests --------------------------------------------------------------------------------------------------------


def test_requests_without_the_token_use_up_nothing_of_those_with_it(serve, begin, monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    url = serve(token="env:SERVE_TOKEN", requests_per_s=1e-6, burst=3)
    stranger = begin(url, LARGE, Authorization="Bearer wrong")
    assert stranger.recv(2**16).startswith(b"HTTP/1.1 401 "), "before its body arrives"
    statuses = [ask(url, b"x", Authorization=f"Bearer {TOKEN}{i}")[0] for i in range(4)]
    assert statuses == [401] * 2 + [429] * 2
    assert [ask(url, method="GET", path="/health")[0] for _ in range(5)] == [200] * 5
    known = {"Authorization": f"Bearer {TOKEN}"}
    assert [ask(url, request_of(sample()), **known)[0] for _ in range(4)] == [200] * 3 + [429]


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_after_everything_else(serve, begin, monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    url, body = serve(token="env:SERVE_TOKEN"), request_of(sample())
    for path, token, expect, first in (
        (wire.PATH, "wrong", "100-continue", b"401"),
        (wire.PATH, "wrong", "foo", b"401"),
        ("/none", "wrong", "100-continue", b"401"),
        ("/none", TOKEN, "100-continue", b"404"),
        ("/health", TOKEN, "100-Continue", b"405"),
        (wire.PATH, TOKEN, "foo", b"200"),
        (wire.PATH, TOKEN, "100-Continue", b"100"),
    ):
        headers = {"Authorization": f"Bearer {token}", "Expect": expect, "Connection": "close"}
        connection = begin(url, len(body), path=path, **headers)
        if first == b"200":
            connection.sendall(body)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 " + first)
        if first == b"100":
            connection.sendall(body)
            assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")


async def test_clients_take_turns_and_one_has_half_of_the_places():
    scoring = Scoring(Reward(), [LoadedReward.of(Reward(), Recorder())], Metrics(), print, most_waiting=8, remembered=0)
    scoring.failed = asyncio.get_running_loop().create_future()

    def samples(name, number):
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


class Visitor:
    """A connection to a `Site`."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def ask(self, path="/"):
        """Returns the body of an answer; empty if the connection has ended."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return await self.answer()

    async def answer(self):
        try:
            async with asyncio.timeout(PATIENCE):
                await self.reader.readuntil(b"\r\n\r\n")
                return await self.reader.readexactly(2)
        except (ConnectionError, asyncio.IncompleteReadError):
            return b""


class Site:
    """A page that answers at once, or at `/held` when `free` is set."""

    def __init__(self):
        self.free, self.arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def handle(self, request):
        if request.path == "/held":
            self.arrived.release()
            await self.free.wait()
        return web.Response(text="ok")

    async def connect(self, address="127.0.0.1"):
        """Returns a connection that has sent nothing; the server has seen it."""
        visitor = Visitor(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0)))
        await settle()
        return visitor

    async def open(self, address="127.0.0.1"):
        visitor = await self.connect(address)
        await visitor.ask()
        return visitor

    async def held(self, address="127.0.0.1"):
        visitor = await self.connect(address)
        visitor.writer.write(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await self.arrived.acquire()
        return visitor


@contextlib.asynccontextmanager
async def site(most, idle_s=PATIENCE):
    page, app = Site(), web.Application()
    app.router.add_get("/{path:.*}", page.handle)
    runner = web.AppRunner(app, keepalive_timeout=idle_s, shutdown_timeout=0.01)
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0))
    page.port = bound.getsockname()[1]
    accepting = await listen(runner, bound, most, idle_s)
    try:
        yield page
    finally:
        accepting.close()
        await runner.cleanup()


async def test_the_longest_idle_connection_makes_room_for_a_new_one():
    async with site(6) as page:
        first, second, third, fourth = [await page.open(f"127.0.0.{i}") for i in (1, 1, 2, 5)]
        busy = [await page.held("127.0.0.1"), await page.held("127.0.0.3")]
        assert await first.ask() == b"ok"
        late = await page.open("127.0.0.4")
        page.free.set()
        assert [await one.ask() for one in (second, first, third, fourth, late)] == [b"", *[b"ok"] * 4]
        assert [await one.answer() for one in busy] == [b"ok"] * 2


async def test_an_address_leaves_an_eighth_of_the_connections_to_others_and_no_request_is_ended_for_a_new_one():
    async with site(8) as page:
        busy = [await page.held() for _ in range(7)]
        assert await (await page.connect()).ask() == b""
        busy.append(await page.held("127.0.0.2"))
        assert await (await page.connect("127.0.0.3")).ask() == b""
        page.free.set()
        assert [await one.answer() for one in busy] == [b"ok"] * 8


async def test_silent_connections_end_neither_requests_nor_idle_ones_and_keep_nobody_out():
    async with site(16) as page:
        idle, busy = [await page.open() for _ in range(3)], [await page.held() for _ in range(4)]
        silent = [await page.connect(f"127.0.1.{i}") for i in range(30)]
        busy.append(await page.held("127.0.0.2"))
        page.free.set()
        assert [await one.ask() for one in idle] == [b"ok"] * 3 and [await one.answer() for one in busy] == [b"ok"] * 5
        assert await silent[0].answer() == b""
    async with site(8) as page:
        silent = [await page.connect() for _ in range(20)]
        assert await (await page.open()).ask() == b"ok" and await silent[0].answer() == b"", "of one address"


async def test_a_new_connection_makes_no_room_before_it_has_asked_and_one_address_keeps_half_of_them_idle():
    async with site(4) as page:
        opened = [Visitor(*await asyncio.open_connection("127.0.0.1", page.port)) for _ in range(4)]
        assert [await one.ask() for one in opened] == [b"ok"] * 4
    async with site(8) as page:
        visitors = [await page.open() for _ in range(6)]
        assert [await one.ask() for one in visitors] == [b"", b""] + [b"ok"] * 4


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
async def test_a_connection_that_asks_for_nothing_is_closed(head):
    async with site(8, idle_s=0.05) as page:
        visitor = await page.connect()
        visitor.writer.write(head)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while await visitor.reader.read(2**16):
                    pass
        visitor.writer.close()


def test_a_process_that_may_open_few_files_has_fewer_connections(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (64, 64))
    handled = type("Server", (), {"request_handler": None, "request_factory": None})()
    assert connections.Connections(handled, 1000)._most == 48
    assert connections.Connections(handled, 10)._most == 10
