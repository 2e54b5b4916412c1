"""Tests `serve-reward` on loopback: what it scores, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import gc
import hmac
import http.client
import json
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web

from omni_async import cli
from omni_async.config.describe import walk
from omni_async.config.schema import Reward
from omni_async.data.image_files import drawn_image, read_prompt_image
from omni_async.media import Media
from omni_async.rewards import wire
from omni_async.rewards.base import Outage, ScoreError
from omni_async.rewards.cache import key_of
from omni_async.rewards.calls import ScorerHangs
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.scorers.jpeg_size import JpegSizeScorer
from omni_async.rewards.server.limits import RateLimit
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import NotNow, Scoring
from omni_async.rewards.server.settings import Server, load_server
from omni_async.types import Prompt, Score
from tests.rewards.server.serving_world import (
    HELD,
    MEDIA,
    PROMPTS,
    ROOT,
    Held,
    HeldByFile,
    Recorder,
    asking,
    command,
    held,
    served,
    write_scorers,
)
from tests.support.patience import PATIENCE, wait_for
from tests.support.ports import listening_at
from tests.test_documented import blocks

TOKEN = "a token of the tests"


def ask(url, body=b"", method="POST", path=wire.PATH, **headers):
    """Returns status, headers and body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": wire.MSGPACK} | headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def metrics_of(url):
    return ask(url, method="GET", path="/metrics")[2]


def refuses(url):
    """Returns whether nobody listens at the address. An answer is not awaited: a server that ends may not give one."""
    where = urlsplit(url)
    try:
        socket.create_connection((where.hostname, where.port), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def request_of(*samples, form=wire.MSGPACK):
    return wire.encode(wire.Request(1, samples), form)


def sample(i=0, key=None):
    return wire.sent_sample(MEDIA[i], PROMPTS[i], key)


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_a_served_score_is_the_scorers_own(tmp_path, form):
    with served(write_scorers(tmp_path, {"name": "jpeg_size"})) as url, asking(url, form=form) as scorer:
        assert [one.value for one in scorer.score(MEDIA, PROMPTS)] == [
            one.value for one in JpegSizeScorer().score(MEDIA, PROMPTS)
        ]


def test_every_part_and_all_of_a_prompt_arrive(tmp_path):
    tone = np.linspace(-1, 1, 20, dtype=np.float32).reshape(2, 10)
    video = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 6), np.uint8)
    media = Media(image=MEDIA[0].image, video=video, fps=12.5, audio=tone, sample_rate=8000)
    prompt = Prompt(7, "a bell", "bell", {"colours": ["red", {"n": 1.5, "none": None}]})
    for form in (wire.MSGPACK, wire.JSON):
        [sent] = wire.decode_request(request_of(wire.sent_sample(media, prompt, "k"), form=form), form).samples
        found, told = wire.sample_of(sent)
        assert told == prompt and (found.fps, found.sample_rate) == (12.5, 8000)
        for part in ("image", "video", "audio"):
            assert np.array_equal(getattr(found, part), getattr(media, part))
            assert not getattr(found, part).flags.writeable


def test_requests_that_wait_are_scored_together(tmp_path):
    with served(write_scorers(tmp_path, HELD)) as url, asking(url) as scorer, ThreadPoolExecutor(8) as pool:

        def ask_for(i: int) -> Future[list[Score]]:
            return pool.submit(scorer.score, MEDIA[i % 4 :][:1], [Prompt(i, str(i))])

        with held():
            calls = [ask_for(0)]
            assert Held.begun.wait(PATIENCE)
            calls += map(ask_for, range(1, 8))
            wait_for(lambda: b"\nomni_async_reward_waiting 7.0\n" in metrics_of(url), "seven waiting requests")
        assert all(call.result()[0].text == "read" for call in calls)
        assert sorted(map(len, Held.batches)) == [1, 7]


def test_a_sample_that_is_asked_for_again_is_scored_once(tmp_path):
    with served(write_scorers(tmp_path)) as url, asking(url) as scorer:
        first = scorer.score(MEDIA, PROMPTS)
        assert scorer.score(MEDIA[1:], PROMPTS[1:]) == first[1:]
        assert sum(map(len, Recorder.batches)) == 4
        scorer.score(MEDIA[:1], [Prompt(0, "another prompt")])
        assert sum(map(len, Recorder.batches)) == 5
        body = request_of(sample(), sample())  # without a key nothing is remembered
        assert ask(url, body)[0] == ask(url, body)[0] == 200
        assert sum(map(len, Recorder.batches)) == 9


def test_a_server_that_remembers_nothing_scores_a_sample_as_often_as_it_is_asked(tmp_path):
    with served(write_scorers(tmp_path, remembered=0)) as url, asking(url) as scorer:
        for _ in range(3):
            scorer.score(MEDIA[:1], PROMPTS[:1])
        assert sum(map(len, Recorder.batches)) == 3


def test_a_prompt_without_what_a_scorer_needs_reaches_no_scorer(tmp_path):
    with served(write_scorers(tmp_path, {"name": "ocr"})) as url, asking(url) as scorer:
        with pytest.raises(ScoreError, match='no text in "double quotes"') as raised:
            scorer.score(MEDIA[:1], [Prompt(0, "a cat")])
        assert not isinstance(raised.value, Outage)
        assert ask(url, method="GET", path="/health")[0] == 200
        assert scorer.score(MEDIA[:1], [Prompt(0, "a cat", "cat")])[0].parts.keys() >= {"ocr"}


def test_a_scorer_that_is_down_is_an_outage_and_answers_again(tmp_path):
    path = write_scorers(tmp_path, reward={"backoff_s": 0.05})
    with served(path) as url, asking(url, retries=0) as scorer:
        scorer.score(MEDIA[:1], PROMPTS[:1])
        Recorder.error = ConnectionError("the judge is away")
        with pytest.raises(Outage, match="the judge is away"):
            scorer.score(MEDIA[1:2], PROMPTS[1:2])
        Recorder.error = None
        with asking(url, retries=100, backoff_max_s=1.0) as patient:
            assert patient.score(MEDIA[1:2], PROMPTS[1:2])[0].text == "read"


# ---- who may ask, and how much ---------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_alone_unless_it_is_told_otherwise(tmp_path):
    for server, address in (({}, "127.0.0.1"), ({"host": "127.0.0.2"}, "127.0.0.2")):
        with served(write_scorers(tmp_path, **server)) as url:
            assert listening_at(urlsplit(url).port) == [address]


def test_only_the_token_opens_and_health_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    with served(write_scorers(tmp_path, token="env:SERVE_TOKEN")) as url:
        for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe9\xff"):
            for path in (wire.PATH, "/metrics", "/nowhere"):
                assert ask(url, request_of(sample()), path=path, Authorization=given)[0] == 401
        assert ask(url, method="GET", path="/health")[0] == 200
        assert Recorder.batches == []
        with asking(url, token=TOKEN) as scorer:
            assert scorer.score(MEDIA, PROMPTS)
        status, _, text = ask(url, method="GET", path="/metrics", Authorization=f"Bearer {TOKEN}")
        assert status == 200
        lines = text.decode().splitlines()
        assert 'omni_async_reward_samples_total{outcome="scored"} 4.0' in lines
        assert 'omni_async_reward_requests_total{status="401"} 18.0' in lines
        assert "omni_async_reward_up 1.0" in lines and TOKEN not in text.decode()


def test_too_many_requests_are_told_when_to_come_back(tmp_path):
    with served(write_scorers(tmp_path, requests_per_s=0.01, burst=3)) as url:
        answers = [ask(url, request_of(sample()))[:2] for _ in range(4)]
        assert [status for status, _ in answers] == [200, 200, 200, 429]
        assert 0 < int(answers[-1][1]["Retry-After"]) <= 100


def test_a_rate_limit_gives_back_in_time_and_forgets_old_addresses():
    limit = RateLimit(2.0, 2)
    assert [limit.wait_s("a", 0.0) for _ in range(3)] == [0, 0, 0.5]
    assert limit.wait_s("b", 0.0) == 0 and limit.wait_s("a", 0.5) == 0 and limit.wait_s("a", 0.5) == 0.5
    for i in range(5000):
        limit.wait_s(str(i), 1.0)
    assert len(limit._buckets) == 4096


def test_more_samples_than_may_wait_are_told_to_come_back(tmp_path):
    path = write_scorers(tmp_path, HELD, reward={"batch": 1}, max_waiting=2)
    with served(path) as url, ThreadPoolExecutor(1) as pool:
        with held():
            first = pool.submit(ask, url, request_of(sample(), sample()))
            assert Held.begun.wait(PATIENCE)  # with one of the two
            status, headers, body = ask(url, request_of(sample(), sample()))
            assert (status, headers["Retry-After"]) == (503, "1") and b"1 samples wait already" in body
        assert first.result()[0] == 200


def test_a_body_is_held_once(tmp_path):
    with served(write_scorers(tmp_path, HELD)) as url, ThreadPoolExecutor(1) as pool:
        with held():
            asked = pool.submit(ask, url, request_of(sample()))
            assert Held.begun.wait(PATIENCE)
            bodies = [one._read_bytes for one in gc.get_objects() if type(one) is web.Request]
            assert bodies and not any(bodies)
        assert asked.result()[0] == 200


def test_more_samples_than_may_ever_wait_are_not_told_to_come_back(tmp_path):
    with served(write_scorers(tmp_path, max_waiting=2)) as url:
        status, headers, body = ask(url, request_of(sample(), sample(), sample()))
        assert status == 413 and "Retry-After" not in headers and b"3 samples in one request" in body
        with asking(url) as scorer, pytest.raises(ScoreError, match="at most 2 may wait") as raised:
            scorer.score(MEDIA, PROMPTS)
        assert not isinstance(raised.value, Outage)


def nested(depth):
    return {} if depth == 0 else {"x": nested(depth - 1)}


def wrong(**changes):
    whole = msgspec.to_builtins(wire.Request(1, (sample(),)), builtin_types=(bytes,))
    image = whole["samples"][0]["media"]["image"]
    for place in (whole, whole["samples"][0], whole["samples"][0]["prompt"], image):
        for name in changes.keys() & place.keys():
            place[name] = changes[name]
    return msgspec.msgpack.encode(whole)


SOUND = {"dtype": "float32", "shape": [1, 2], "rate": 8000.0, "data": np.float32([0, np.inf]).tobytes()}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metadata": {"x": [0] * 20_000}}, "metadata: more than 20000 values, or nested more than 50 deep"),
        ({"metadata": {"x": [0] * 300_000}}, "more than 250000 values"),
        ({"metadata": {"x": "x" * (2**20 + 1)}}, "a text of more than 1048576 characters"),
        ({"metadata": {"x": ["é" * (2**20 + 1)]}}, "a text of more than 1048576 characters"),
        ({"metadata": {"x": {"x" * (2**20 + 1): 1}}}, "a text of more than 1048576 characters"),
        ({"metadata": {1: 2}}, "Expected `str`"),
        ({"metadata": {"x": {1: 2}}}, "metadata: keys are texts, got a int"),
        ({"metadata": {"x": float("inf")}}, "metadata: expected finite numbers"),
        ({"text": "x" * (2**20 + 1)}, "a text of more than 1048576 characters"),
        ({"media": {"audio": SOUND}}, "audio: expected finite numbers"),
        ({"media": {"audio": SOUND | {"rate": float("nan")}}}, "Expected `float` > 0.0"),
    ],
)
def test_what_is_wrong_with_a_sample_is_named(changes, why):
    with pytest.raises(wire.WireError, match=why):
        wire.sample_of(wire.decode_request(wrong(**changes), wire.MSGPACK).samples[0])


def test_metadata_are_50_levels_deep_and_have_integers_of_64_bits():
    wire.sample_of(wire.decode_request(wrong(metadata=nested(50)), wire.MSGPACK).samples[0])
    with pytest.raises(wire.WireError, match="nested more than 50 deep"):
        wire.sample_of(wire.decode_request(wrong(metadata=nested(51)), wire.MSGPACK).samples[0])
    body = request_of(sample(), form=wire.JSON).replace(b'"red"', b"9" * 400)
    with pytest.raises(wire.WireError, match="expected integers of 64 bits"):
        wire.sample_of(wire.decode_request(body, wire.JSON).samples[0])


def test_texts_of_metadata_have_as_many_characters_as_other_texts():
    for text in ("\U0001f600" * 2**20, "x" * 2**20):
        for form in (wire.MSGPACK, wire.JSON):
            one = wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata={"x": text, text: 1}), None)
            wire.sample_of(wire.decode_request(request_of(one, form=form), form).samples[0])
    for metadata in ({"x": ["é" * (2**20 + 1)]}, {"x" * (2**20 + 1): 1}):
        body = request_of(wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata=metadata), None), form=wire.JSON)
        with pytest.raises(wire.WireError, match="metadata: expected texts of 1048576 characters at most, got 1048577"):
            wire.sample_of(wire.decode_request(body, wire.JSON).samples[0])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff" * 100, 400),
        (b"\x91" * 100_000, 400),
        (request_of(sample())[:-1], 400),
        (request_of(), 400),
        (wrong(version=2), 400),
        (wrong(samples=[{}]), 400),
        (wrong(shape=[3, 8, 9]), 400),
        (wrong(shape=[2**31, 2**31, 2**31]), 400),
        (wrong(shape=[-3, -8, 8]), 400),
        (wrong(shape=[3, 0, 8], data=b""), 400),
        (wrong(shape=[8, 8, 3]), 400),
        (wrong(dtype="object"), 400),
        (wrong(dtype="float32"), 400),
        (wrong(data="text"), 400),
        (wrong(media={}), 400),
        (wrong(text=b"\xed\xa0\x80"), 400),
        (wrong(metadata={"x": b"bytes"}), 400),
        (wrong(metadata={"x": msgspec.msgpack.Ext(5, b"y")}), 400),
        (wrong(metadata={"x": float("nan")}), 400),
        (wrong(metadata={"x": [0] * 30_000}), 400),
        (b"x" * 20_000_000, 413),
    ],
)
def test_a_wrong_request_is_a_4xx_and_reaches_no_scorer(tmp_path, body, status):
    with served(write_scorers(tmp_path, max_request="16MiB")) as url:
        assert ask(url, body)[0] == status
        assert Recorder.batches == [] and ask(url, method="GET", path="/health")[0] == 200


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"path": "/v2/score"}, 404),
        ({"path": "/../../etc/passwd"}, 404),
        ({"Content-Type": "application/x-pickle"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Length": "-1"}, 400),
        ({"X-Long": "x" * 10_000}, 400),
    ],
)
def test_a_wrong_way_to_ask_is_a_4xx(tmp_path, how, status):
    with served(write_scorers(tmp_path)) as url:
        answered, _, body = ask(url, request_of(sample()), **how)
        assert answered == status and (status == 400 or b"error" in body)


def test_a_body_without_a_length_is_a_411_and_the_token_is_compared_in_constant_time(tmp_path, monkeypatch):
    compared = []

    def compare(given, token):
        compared.append((given, token))
        return given == token

    monkeypatch.setattr(hmac, "compare_digest", compare)
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    with served(write_scorers(tmp_path, token="env:SERVE_TOKEN")) as url:
        assert ask(url, iter([b"x"]), Authorization=f"Bearer {TOKEN}")[0] == 411
        assert ask(url, b"x", Authorization="Bearer \xe9")[0] == 401
    assert compared == [(given, f"Bearer {TOKEN}".encode()) for given in (f"Bearer {TOKEN}".encode(), b"Bearer \xe9")]


def test_a_body_that_does_not_arrive_is_a_408(tmp_path):
    with served(write_scorers(tmp_path, read_s=0.1)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        connection.putrequest("POST", wire.PATH)
        connection.putheader("Content-Type", wire.JSON)
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 408 and b"did not arrive within 0.1 s" in response.read()
        connection.close()


def test_a_mistake_of_the_server_is_a_500_that_is_counted_and_told(tmp_path, monkeypatch):
    async def broken(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Scoring, "score", broken)
    told: list[str] = []
    with served(write_scorers(tmp_path), told.append) as url:
        status, _, body = ask(url, request_of(sample()))
        assert status == 500 and msgspec.msgpack.decode(body).keys() == {"error"} and b"a mistake" not in body
        assert b'omni_async_reward_requests_total{status="500"} 1.0' in ask(url, method="GET", path="/metrics")[2]
    assert len(told) == 1 and "a request failed: RuntimeError: a mistake" in told[0]


# ---- the file and the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["server.prt=1"], "server.prt: unknown key; did you mean 'port'?"),
        (["server.port=70000"], "server.port: expected int >= 0, <= 65535, got 70000"),
        (["server.token=secret-in-the-file"], "server.token: expected"),
        (["server.token=env:NOT_SET_ANYWHERE"], "set NOT_SET_ANYWHERE"),
        (["server.token=env:SHORT_TOKEN"], "server.token: expected 16 or more printable ASCII characters"),
        (["server.host=0.0.0.0"], "server.token: required where server.host = 0.0.0.0"),
        (["server.host=192.0.2.1", "server.token=env:SERVE_TOKEN"], "server.port: cannot listen at 192.0.2.1:0"),
        (["reward.scorers=[]"], "reward.scorers: empty"),
        (["reward.scorers=[{name: orc}]"], "did you mean 'ocr'?"),
        (["reward.scorers=[{name: jpeg_size, params: {quality: 500}}]"], "parameter 'quality'"),
        (["trainer.updates=5"], "trainer: unknown key"),
        (
            ["reward.scorers=[{name: tests.rewards.server.serving_world:OnDevice}]", "placement.reward.gpus=1"],
            "placement.reward.gpus: 1",
        ),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, overrides, said):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setenv("SHORT_TOKEN", "short")
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    assert cli.main(["serve-reward", str(write_scorers(tmp_path)), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert said in printed.err and "secret-in-the-file" not in printed.err


@pytest.mark.parametrize(("gpus", "devices"), [(0, ("", "")), (0.5, ("3", "5"))])
def test_scorers_without_gpus_find_no_device(tmp_path, monkeypatch, gpus, devices):
    names = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    monkeypatch.setenv(names[0], "3")
    monkeypatch.setenv(names[1], "5")
    seen = []

    async def serve(*given):
        seen.append(tuple(os.environ[name] for name in names))
        return 0

    monkeypatch.setattr("omni_async.rewards.server.serve.serve", serve)
    assert cli.main(["serve-reward", str(write_scorers(tmp_path)), f"placement.reward.gpus={gpus}"]) == 0
    assert seen == [devices]


def test_the_page_has_every_key_of_a_server_with_its_default_and_its_file_is_right(tmp_path):
    page = ROOT / "docs" / "rewards" / "http.md"
    rows = {
        line.split("`")[1]: line.split("`")[3] for line in page.read_text().splitlines() if line[:10] == "| `server."
    }
    shown = {name: "null" if default is None else str(default) for name, _, default in walk(Server, "server.")}
    assert rows == shown
    path = tmp_path / "scorers.yaml"
    path.write_text(next(blocks(page, "yaml")))
    assert load_server(path).reward.scorers[0].name == "ocr"


def test_sigterm_lets_a_request_under_way_finish(tmp_path):
    scorer = {"name": f"{HeldByFile.__module__}:HeldByFile", "params": {"folder": str(tmp_path)}}
    path = write_scorers(tmp_path, scorer, grace_s=2 * PATIENCE)
    with command(path) as (process, url), asking(url, retries=0, timeout_s=2 * PATIENCE) as client:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(client.score, MEDIA, PROMPTS)
            wait_for((tmp_path / "begun").exists, "the request")
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses(url), "the end of listening")
            time.sleep(0.5)  # a server without patience would end the request
            assert not answers.done()
            (tmp_path / "free").touch()
            assert len(answers.result()) == 4
        assert process.wait(PATIENCE) == 0


def test_ctrl_c_ends_it_with_130_and_nothing_on_stderr(tmp_path):
    with command(write_scorers(tmp_path, {"name": "jpeg_size"})) as (process, url):
        assert json.loads(ask(url, method="GET", path="/health")[2]) == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130 and process.stderr.read() == ""


def test_a_scorer_that_hangs_for_good_ends_the_server_with_1(tmp_path):
    reward = {"timeout_s": 0.05, "backoff_s": 0.01, "backoff_max_s": 0.01, "outage_s": 0.1}
    path = write_scorers(tmp_path, {"name": f"{Recorder.__module__}:Hanging"}, reward=reward)
    with command(path) as (process, url), asking(url, retries=0) as scorer:
        while process.poll() is None:
            with pytest.raises(Outage):
                scorer.score(MEDIA[:1], PROMPTS[:1])
        assert process.returncode == 1
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("omni-async: the server ends: scorer ") and "calls have not returned" in last


async def test_a_lost_worker_leaves_no_request_waiting(monkeypatch):
    async def hangs(media: object, prompt: object, whole: bool) -> None:
        raise ScorerHangs("8 calls have not returned")

    reward = LoadedReward.of(Reward(), Recorder())
    async with Scoring(Reward(), [reward], Metrics(), print, most_waiting=9, remembered=9) as scoring:
        monkeypatch.setattr(scoring._panels[0], "score", hangs)
        [outcome] = await scoring.score([("key", MEDIA[0], PROMPTS[0])])
        assert (outcome.error, outcome.kind) == ("the server is ending", "outage")
        await asyncio.wait({scoring.failed})
        assert isinstance(scoring.failed.exception(), ScorerHangs)
        with pytest.raises(NotNow, match="the server is ending"):
            await scoring.score([("key", MEDIA[0], PROMPTS[0])])


def test_the_images_of_a_prompt_arrive_as_bytes_and_never_as_a_path():
    drawn = drawn_image(MEDIA[0], "/etc/hostname")
    sent = wire.sent_sample(MEDIA[1], Prompt(0, "brighter", images=(drawn,)), None)
    [found] = wire.sample_of(sent)[1].images
    assert np.array_equal(read_prompt_image(found).image, MEDIA[0].image)
    assert found.path == "image 0 of the prompt" and b"hostname" not in request_of(sent)


def test_a_kept_answer_is_that_of_the_image_which_the_prompt_carries():
    drawn = [drawn_image(media, "drawn") for media in MEDIA[:2]]
    sent = [wire.sent_sample(MEDIA[2], Prompt(0, "brighter", images=(one,)), None) for one in drawn]
    keys = [key_of(b"scorer", b"media", wire.sample_of(one)[1]) for one in sent]
    assert keys[0] != keys[1]
    assert keys == [key_of(b"scorer", b"media", Prompt(0, "brighter", images=(one,))) for one in drawn]
