"""Tests the scorer `http`: retries, several servers, hedging, and servers that answer wrongly."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import aiohttp
import msgspec
import pytest

from omni_async.config import schema
from omni_async.config.proxies import proxy_for
from omni_async.rewards import registry, wire
from omni_async.rewards.base import Outage, ScoreError, require_scores
from omni_async.rewards.failures import is_outage
from omni_async.rewards.scorers.http import HttpScorer
from tests.rewards.server.serving_world import MEDIA, PROMPTS, ROOT, answering, asking
from tests.support.patience import PATIENCE
from tests.support.ports import unused_address
from tests.test_documented import blocks

GOOD = msgspec.msgpack.encode({"version": 1, "scores": [{"value": 0.5}]})


def score_one(scorer):
    return scorer.score(MEDIA[:1], PROMPTS[:1])


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_with_the_same_keys(status):
    with answering(lambda n: (200, GOOD) if n == 3 else (status, b"")) as (url, bodies), asking(url) as scorer:
        assert score_one(scorer)[0].value == 0.5
    assert len(bodies) == 3 and len(set(bodies)) == 1
    assert wire.decode_request(bodies[0], wire.MSGPACK).samples[0].key


def test_after_its_retries_it_is_an_outage_in_the_servers_words():
    refusal = msgspec.msgpack.encode({"error": "the model is loading\nfor\x1b[2J a while"})
    with answering(lambda n: (503, refusal)) as (url, bodies), asking(url, retries=1) as scorer:
        with pytest.raises(Outage, match=r"answered 503: the model is loading for\\x1b\[2J a while \(asked 2 times\)"):
            score_one(scorer)
        assert len(bodies) == 2


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_what_a_server_refuses_is_not_sent_again(status):
    with answering(lambda n: (status, b"")) as (url, bodies), asking(url) as scorer:
        with pytest.raises(ScoreError, match=f"answered {status}") as raised:
            score_one(scorer)
        assert len(bodies) == 1 and not is_outage(raised.value)


def test_a_dead_server_costs_an_attempt_and_then_only_the_other_is_asked():
    with (
        answering(lambda n: (503, b"")) as (away, asked),
        answering(lambda n: (200, GOOD)) as (url, bodies),
        asking(away, url, timeout_s=100) as scorer,
    ):
        for _ in range(10):
            assert score_one(scorer)[0].value == 0.5
    assert len(asked) <= 1 and len(bodies) == 10
    with (
        unused_address() as address,
        asking(f"http://{address}") as scorer,
        pytest.raises(Outage, match="cannot be asked"),
    ):
        score_one(scorer)


def test_a_server_that_failed_once_has_its_share_again_after_a_while():
    with (
        answering(lambda n: (200, GOOD) if n > 1 else (503, b"")) as (url, asked),
        answering(lambda n: (200, GOOD)) as (other, _),
        asking(url, other, timeout_s=PATIENCE) as scorer,
    ):

        def score_until(number: int, at_most: int = 100) -> None:
            for _ in range(at_most):  # which of the two is asked is drawn
                if len(asked) < number:
                    assert score_one(scorer)[0].value == 0.5

        score_until(1)
        score_until(2, at_most=10)
        assert len(asked) == 1, "it has failed"
        scorer.loop.move(PATIENCE)
        score_until(3)
    assert len(asked) == 3


def test_a_slow_server_is_hedged_by_another_and_the_first_answer_counts():
    release = threading.Event()

    def slow(n: int) -> tuple[int, bytes]:
        release.wait(PATIENCE)
        return 200, GOOD

    with (
        answering(slow) as (stuck, asked),
        answering(lambda n: (200, GOOD)) as (url, _),
        asking(stuck, url, hedge_s=0.01, timeout_s=100) as scorer,
    ):
        for _ in range(20):  # which of the two is first is drawn
            assert score_one(scorer)[0].value == 0.5
        release.set()
    assert asked


@pytest.mark.parametrize("number", range(10))  # which of the two is looked at first is not ours to say
async def test_a_failure_that_comes_with_an_answer_does_not_count(monkeypatch, number):
    scorer = HttpScorer(urls=("http://a", "http://b"), hedge_s=0.001, retries=0)
    servers = scorer._servers
    answer, begun, both = wire.Answer(1, (wire.Outcome(value=0.5),)), [], asyncio.Event()

    async def attempt(server, question, read, refusal):
        begun.append(server)
        if len(begun) == 2:
            asyncio.get_running_loop().call_soon(both.set)
        await both.wait()
        if server is servers.servers[0]:
            raise ScoreError("refused")
        return answer

    monkeypatch.setattr(servers, "_attempt", attempt)
    assert (await scorer.score(MEDIA[:1], PROMPTS[:1]))[0].value == 0.5


def test_a_server_that_hangs_is_left_after_the_time_out():
    release = threading.Event()

    def hang(n: int) -> tuple[int, bytes]:
        scorer.loop.move(PATIENCE)
        release.wait(PATIENCE)
        return 200, GOOD

    with answering(hang) as (url, bodies), asking(url, timeout_s=PATIENCE, retries=1) as scorer:
        with pytest.raises(Outage, match=r"did not answer within 60 s \(asked 2 times\)"):
            score_one(scorer)
        release.set()
    assert len(bodies) == 2


def test_an_answer_may_take_as_long_as_timeout_s_says_whatever_the_library_thinks(monkeypatch):
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))

    def slow(n: int) -> tuple[int, bytes]:
        time.sleep(0.3)
        return 200, GOOD

    with answering(slow) as (url, bodies), asking(url, timeout_s=100, retries=0) as scorer:
        assert score_one(scorer)[0].value == 0.5
    assert len(bodies) == 1


def packed(**outcome):
    return msgspec.msgpack.encode({"version": 1, "scores": [outcome]})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "sent no answer of the protocol"),
        (b"<html>", "sent no answer of the protocol"),
        (GOOD[:-3], "sent no answer of the protocol"),
        (b"\x91" * 100_000, "sent no answer of the protocol"),
        (b"\xdf\xff\xff\xff\xff", "sent no answer of the protocol"),
        (msgspec.msgpack.encode({"version": 2, "scores": []}), "sent no answer of the protocol"),
        (packed(value="1.0"), "sent no answer of the protocol"),
        (packed(value=[1.0]), "sent no answer of the protocol"),
        (packed(value=True), "sent no answer of the protocol"),
        (packed(value=1, parts=[1]), "sent no answer of the protocol"),
        (packed(value=1, text="T").replace(b"\xa1T", b"\xa3\xed\xa0\x80"), "sent no answer of the protocol"),
        (msgspec.msgpack.encode({"version": 1, "scores": []}), "0 scores for 1 samples"),
        (msgspec.msgpack.encode({"version": 1, "scores": [{"value": 1}] * 2}), "2 scores for 1 samples"),
        (packed(), "neither a value nor an error"),
        (packed(error="bad\n" * 10_000), r"^bad bad .{290,}\.\.\.$"),
        (packed(value=float("nan")), "value is nan"),
        (packed(value=float("inf")), "value is inf"),
        (packed(value=1, parts={"p" * 1000: 1}), "a part is called"),
        (packed(value=1, parts={str(i): 1 for i in range(1000)}), "1000 parts"),
    ],
)
def test_a_wrong_answer_is_an_error_and_never_a_number(body, said):
    with answering(lambda n: (200, body)) as (url, _), asking(url, retries=1) as scorer:
        with pytest.raises(ScoreError, match=said) as raised:
            require_scores("http", score_one(scorer), PROMPTS[:1])
        assert not isinstance(raised.value, Outage)


@pytest.mark.parametrize(
    "body", [b'{"version":1,"scores":[{"value":%s}]}' % one for one in (b"NaN", b"1e999", b'"\\ud800"')]
)
def test_a_wrong_answer_in_json_is_an_error(body):
    with (
        answering(lambda n: (200, body)) as (url, _),
        asking(url, retries=0, form="json") as scorer,
        pytest.raises(ScoreError, match="sent no answer of the protocol"),
    ):
        score_one(scorer)


def test_an_answer_that_is_cut_off_by_the_connection_is_asked_for_again():
    with answering(lambda n: (200, GOOD), cut=3) as (url, bodies), asking(url) as scorer:
        with pytest.raises(Outage, match="cannot be asked"):
            score_one(scorer)
        assert len(bodies) == 3


def test_a_megabyte_of_text_is_cut_and_one_without_end_is_not_read():
    long = packed(value=1, text="x" * 2**20)
    with answering(lambda n: (200, long)) as (url, _), asking(url) as scorer:
        [score] = require_scores("http", score_one(scorer), PROMPTS[:1])
        assert len(score.text) < 2100
    with (
        answering(lambda n: (200, b" " * (2**26 + 1))) as (url, _),
        asking(url) as scorer,
        pytest.raises(ScoreError, match="more than 67108864 bytes"),
    ):
        score_one(scorer)


def test_an_outage_of_one_sample_is_an_outage():
    outcomes = [{"error": "unreadable"}, {"error": "away", "kind": "outage"}]
    body = msgspec.msgpack.encode({"version": 1, "scores": outcomes})
    with answering(lambda n: (200, body)) as (url, _), asking(url) as scorer, pytest.raises(Outage, match="away"):
        scorer.score(MEDIA[:2], PROMPTS[:2])


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "ftp://x", "http://user:password@x", "http://x?token=1", "http://x\n", "file:///etc/passwd"]
)
def test_a_url_that_is_none_or_holds_a_credential_is_refused(url):
    with pytest.raises(registry.ScorerConfigError, match="parameter 'urls'"):
        registry.build(schema.Scorer(name="http", params={"urls": [url]}))


def test_credentials_in_what_a_server_reports_are_masked():
    answer = msgspec.msgpack.encode({"version": 1, "scores": [{"error": "https://me:hunter2@h failed"}]})
    with (
        answering(lambda n: (200, answer)) as (url, _),
        asking(url) as scorer,
        pytest.raises(ScoreError, match=r"^https://\*\*\*@h failed$"),
    ):
        score_one(scorer)


def test_the_token_reaches_no_message(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "sesame-sesame-sesame")
    config = schema.Scorer(name="http", params={"urls": ["http://127.0.0.1:1"], "token": "env:A_TOKEN"})
    assert registry.secrets_of(config) == {"sesame-sesame-sesame"}
    assert registry.concurrency_of(config) is None


def test_the_documented_server_is_short_and_scores():
    [page] = [one for one in blocks(ROOT / "docs" / "rewards" / "http.md", "python") if "brightness_server" in one]
    lines = [line for line in page.splitlines() if line.strip()]
    assert len(lines) <= 32
    namespace = {"__name__": "brightness_server"}
    exec(page, namespace)
    server = namespace["ThreadingHTTPServer"](("127.0.0.1", 0), namespace["Handler"])
    namespace["Handler"].log_message = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with asking(f"http://127.0.0.1:{server.server_port}", form="json") as scorer:
            scores = scorer.score(MEDIA, PROMPTS)
            assert [one.value for one in scores] == pytest.approx([one.image.mean() / 255 for one in MEDIA])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_documented_messages_are_those_of_the_protocol():
    request, answer = blocks(ROOT / "docs" / "rewards" / "http.md", "json")
    sent = json.loads(request)
    image = sent["samples"][0]["media"]["image"]
    image["data"] = "AAAA" * (3 * 64 * 64 // 3)
    asked = wire.decode_request(json.dumps(sent).encode(), wire.JSON)
    media, prompt = wire.sample_of(asked.samples[0])
    assert media.image.shape == (3, 64, 64) and re.search('"open"', prompt.text) and prompt.target == "open"
    assert [one.kind for one in wire.decode_answer(answer.encode(), wire.JSON).scores] == ["sample", "sample"]


# ---- proxies ---------------------------------------------------------------------------------------------------------


def test_the_proxy_of_the_environment_is_asked_for_a_remote_server(monkeypatch):
    with answering(lambda n: (200, GOOD)) as (proxy, bodies):
        monkeypatch.setenv("http_proxy", proxy)
        with asking("http://reward.internal.example:8000", retries=0) as scorer:
            assert score_one(scorer)[0].value == 0.5
        assert len(bodies) == 1


def test_a_server_of_this_machine_or_of_no_proxy_is_asked_directly(monkeypatch):
    with unused_address() as proxy, answering(lambda n: (200, GOOD)) as (url, bodies), asking(url) as scorer:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        assert score_one(scorer)[0].value == 0.5 and len(bodies) == 1
    monkeypatch.setenv("no_proxy", ".internal.example")
    assert proxy_for("http://reward.internal.example:8000/x") is None
    assert proxy_for("http://other.example/x") is not None
    assert all(proxy_for(f"http://{host}:8000") is None for host in ("localhost", "[::1]", "127.0.0.9", "a.localhost"))


def test_an_error_names_the_proxy_without_its_password(monkeypatch):
    with (
        unused_address() as proxy,
        asking("http://reward.internal.example:8000", retries=0) as scorer,
        pytest.raises(Outage) as raised,
    ):
        monkeypatch.setenv("http_proxy", f"http://me:hunter2222@{proxy}")
        score_one(scorer)
    named = rf"cannot be asked \(through the proxy http://.*@{re.escape(proxy)} "
    assert re.search(named, str(raised.value))
    assert "hunter2222" not in str(raised.value)
