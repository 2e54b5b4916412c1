"""Tests whom scorers ask of several servers, and that no fault of a server becomes an answer."""

import asyncio
import contextlib
import gzip
import re

import aiohttp
import pytest

from omni_async.aio.backoff import Backoff
from omni_async.config.proxies import proxy_for
from omni_async.rewards.base import Outage, ScoreError
from omni_async.rewards.scorers.judging import read_refusal
from omni_async.rewards.scorers.model_servers import BadAnswer, ModelServers, Question
from tests.rewards.judge_server import judging
from tests.support.moved_clock import move_clock, on_a_moved_clock
from tests.support.patience import PATIENCE
from tests.support.ports import unused_address

FINE = b"fine"
REMOTE = "http://reward.internal.example:8000"


def fine(body, n):
    return FINE


@contextlib.asynccontextmanager
async def asking(*servers, role=None, token=None, timeout_s=100.0, hedge_s=None, retries=2):
    urls = [one if isinstance(one, str) else one.url for one in servers]
    limits = {"timeout_s": timeout_s, "hedge_s": hedge_s, "retries": retries, "connections": 64}
    found = ModelServers(urls, role, token=token, pauses=Backoff(0.01, 0.05), **limits)
    try:
        yield found
    finally:
        await found.close()


async def ask(servers):
    def read(content):
        if content != FINE:
            raise BadAnswer("sent something else")
        return content

    return await servers.ask(Question("/ask", b"a question"), read, read_refusal)


# ---- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_busy_server_is_asked_again_without_its_cookies(status):
    replies = [(status, {}), (429, {}, {"Retry-After": "1"}), b"else", FINE]
    async with judging(lambda body, n: replies[n - 1]) as server, asking(server, retries=3) as servers:
        assert await ask(servers) == FINE
    assert server.asked == [b"a question"] * 4
    assert not any("Cookie" in headers for headers in server.headers)


REFUSED = {"error": {"message": "the model is loading\nfor\x1b[2J a while"}}
WORDS = r"the model is loading for\\x1b\[2J a while"


@pytest.mark.parametrize(
    ("reply", "said", "outage", "asked"),
    [
        ((503, REFUSED), rf"answered 503: {WORDS} \(asked 2 times\)", True, 2),
        ((500, b"<html>oops</html>"), r"answered 500 \(asked 2 times\)", True, 2),
        (b"else", r"sent something else \(asked 2 times\)", False, 2),
        ((200, gzip.compress(FINE, mtime=0), {"Content-Encoding": "gzip"}), "sent something else", False, 2),
        ((404, REFUSED), rf"answered 404: {WORDS}$", False, 1),
        ((401, {"error": "who are you"}), "answered 401: who are you", False, 1),
        *(((status, b""), f"answered {status}$", False, 1) for status in (301, 400, 413, 422)),
        (b" " * (2**26 + 1), "answers with more than 67108864 bytes", False, 1),
    ],
    ids=lambda one: str(one)[:24],
)
async def test_a_fault_is_an_error_that_names_the_server_and_never_an_answer(reply, said, outage, asked):
    async with (
        judging(lambda body, n: reply) as server,
        asking(server, retries=1, token="sesame-sesame") as servers,
    ):
        with pytest.raises(ScoreError, match=f"^{server.url}(/ask)? {said}") as raised:
            await ask(servers)
        assert isinstance(raised.value, Outage) is outage and len(server.asked) == asked
    assert "sesame" not in str(raised.value) and "\n" not in str(raised.value)
    assert server.headers[0]["Authorization"] == "Bearer sesame-sesame"


async def test_no_redirect_is_followed():
    async with (
        judging(fine) as other,
        judging(lambda body, n: (307, {}, {"Location": f"{other.url}/ask"})) as server,
        asking(server, token="sesame-sesame") as servers,
    ):
        with pytest.raises(ScoreError, match="answered 307"):
            await ask(servers)
    assert not other.asked


async def test_an_answer_that_is_cut_off_by_the_connection_is_asked_for_again():
    async with judging(fine, cut=2) as server, asking(server) as servers:
        with pytest.raises(Outage, match="cannot be asked"):
            await ask(servers)
    assert len(server.asked) == 3


async def test_an_answer_may_take_as_long_as_timeout_s_whatever_the_library_thinks(monkeypatch):
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))

    async def slow(body, n):
        await asyncio.sleep(0.3)
        return FINE

    async with judging(slow) as server, asking(server, retries=0) as servers:
        assert await ask(servers) == FINE


@on_a_moved_clock
async def test_a_server_that_hangs_is_left_after_the_time_out():
    over = asyncio.Event()

    async def hang(body, n):
        move_clock(PATIENCE)
        await over.wait()

    async with judging(hang) as server, asking(server, timeout_s=PATIENCE, retries=1) as servers:
        with pytest.raises(Outage, match=r"did not answer within 60 s \(asked 2 times\)"):
            await ask(servers)
        over.set()


# ---- several servers -------------------------------------------------------------------------------------------------


async def test_the_server_with_the_fewest_questions_is_asked():
    all_asked = asyncio.Event()

    async def slow(body, n):
        if len(one.asked) + len(other.asked) == 20:
            all_asked.set()
        await all_asked.wait()
        return FINE

    async with judging(slow) as one, judging(slow) as other, asking(one, other) as servers:
        await asyncio.gather(*(ask(servers) for _ in range(20)))
    assert (one.most, other.most) == (10, 10) and len(one.asked) == len(other.asked) == 10


async def test_a_dead_server_costs_an_attempt_and_then_only_the_other_is_asked():
    async with judging(lambda body, n: (503, b"")) as away, judging(fine) as server, asking(away, server) as servers:
        for _ in range(10):
            assert await ask(servers) == FINE
    assert len(away.asked) <= 1 and len(server.asked) == 10
    with unused_address() as address:
        async with asking(f"http://{address}") as servers:
            with pytest.raises(Outage, match="cannot be asked"):
                await ask(servers)


@on_a_moved_clock
async def test_a_server_that_failed_once_has_its_share_again_after_a_while():
    async with (
        judging(lambda body, n: FINE if n > 1 else (503, b"")) as server,
        judging(fine) as other,
        asking(server, other, timeout_s=PATIENCE) as servers,
    ):

        async def ask_until(number, at_most=100):
            for _ in range(at_most):  # which of the two is asked is drawn
                if len(server.asked) < number:
                    assert await ask(servers) == FINE

        await ask_until(1)
        await ask_until(2, at_most=10)
        assert len(server.asked) == 1, "it has failed"
        move_clock(PATIENCE)
        await ask_until(3)
    assert len(server.asked) == 3


@on_a_moved_clock
async def test_a_server_that_hangs_is_hedged_and_soon_asked_last():
    over = asyncio.Event()

    async def stuck(body, n):
        move_clock(PATIENCE)
        await over.wait()

    async with (
        judging(stuck) as one,
        judging(fine) as other,
        asking(one, other, hedge_s=PATIENCE, timeout_s=100 * PATIENCE) as servers,
    ):
        for _ in range(40):  # whom of two idle servers it asks is drawn
            assert await ask(servers) == FINE
        over.set()
    assert len(one.asked) == 3 and len(other.asked) == 40


@pytest.mark.parametrize("number", range(10))  # the order of the two is not defined
async def test_a_failure_that_comes_with_an_answer_does_not_count(monkeypatch, number):
    begun, both = [], asyncio.Event()

    async def attempt(server, question, read, refusal):
        begun.append(server)
        if len(begun) == 2:
            asyncio.get_running_loop().call_soon(both.set)
        await both.wait()
        if server is servers.servers[0]:
            raise ScoreError("refused")
        return FINE

    async with asking("http://a", "http://b", hedge_s=0.001, retries=0) as servers:
        monkeypatch.setattr(servers, "_attempt", attempt)
        assert await ask(servers) == FINE


async def test_addresses_of_a_role_are_asked_for_with_their_tokens_and_again_when_one_is_gone():
    calls = []
    async with judging(fine) as server, judging(fine) as spare, asking(role="qwen", retries=1) as servers:
        found = {"qwen-0": server.url.replace("//", "//:sesame@")}

        async def addresses(role):
            calls.append(role)
            return found

        with pytest.raises(ScoreError, match="the servers of 'qwen' are started by a run"):
            await ask(servers)
        servers.connect(addresses)
        await ask(servers)
        await ask(servers)
        assert calls == ["qwen"], "the address is known"
        assert server.headers[0]["Authorization"] == "Bearer sesame"
        server.answer = lambda body, n: (503, {})
        found = {"qwen-0.2": spare.url}
        await ask(servers)
        assert len(spare.asked) == 1 and "Authorization" not in spare.headers[0]


# ---- proxies ---------------------------------------------------------------------------------------------------------


async def test_the_proxy_of_the_environment_is_asked_for_a_remote_server_alone(monkeypatch):
    async with judging(fine) as proxy, asking(REMOTE, retries=0) as servers:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await ask(servers) == FINE and len(proxy.asked) == 1
    async with judging(fine) as server, asking(server, retries=0) as servers:
        monkeypatch.setenv("http_proxy", REMOTE)
        assert await ask(servers) == FINE and len(server.asked) == 1
    monkeypatch.setenv("no_proxy", ".internal.example")
    assert proxy_for(f"{REMOTE}/x") is None and proxy_for("http://other.example/x") is not None
    assert all(proxy_for(f"http://{host}:8000") is None for host in ("localhost", "[::1]", "127.0.0.9", "a.localhost"))


async def test_an_error_names_the_proxy_without_its_password(monkeypatch):
    with unused_address() as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:hunter2222@{proxy}")
        async with asking(REMOTE, retries=0) as servers:
            with pytest.raises(Outage) as raised:
                await ask(servers)
    named = rf"cannot be asked \(through the proxy http://.*@{re.escape(proxy)} "
    assert re.search(named, str(raised.value)) and "hunter2222" not in str(raised.value)
