"""Tests `serve-reward` on loopback: what it scores, what it refuses, how it ends."""

import asyncio
import gc
import hmac
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web

from omni_async import cli
from omni_async.config.describe import walk
from omni_async.config.reward import Reward
from omni_async.data.image_files import drawn_image, read_prompt_image
from omni_async.media import Media
from omni_async.rewards import wire
from omni_async.rewards.base import Outage, ScoreError
from omni_async.rewards.cache import key_of
from omni_async.rewards.calls import ScorerHangs
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.scorers.http import HttpScorer
from omni_async.rewards.scorers.jpeg_size import JpegSizeScorer
from omni_async.rewards.server.limits import RateLimit
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import NotNow, Scoring
from omni_async.rewards.server.settings import Server, load_server
from omni_async.types import Prompt
from tests.rewards.server.serving_world import (
    HELD,
    MEDIA,
    PROMPTS,
    ROOT,
    TOKEN,
    Held,
    HeldByFile,
    Recorder,
    ask,
    asking,
    command,
    held,
    measured,
    request_of,
    sample,
    write_scorers,
)
from tests.support.patience import PATIENCE, wait_for
from tests.support.ports import listening_at
from tests.test_documented import blocks

DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


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


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_a_served_score_is_the_scorers_own(serve, client, form):
    found = client(serve({"name": "jpeg_size"}), form=form)()
    assert [one.value for one in found] == [one.value for one in JpegSizeScorer().score(MEDIA, PROMPTS)]


def test_every_part_and_all_of_a_prompt_arrive():
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


def test_a_text_arrives_with_its_end_and_has_a_key_of_its_own():
    texts = [Media(text=text, finish=finish) for text in ("4", "néin \U0001f600") for finish in ("stop", "length")]
    both = Media(image=MEDIA[0].image, text="4", finish="stop")
    for form in (wire.MSGPACK, wire.JSON):
        body = request_of(*(wire.sent_sample(one, PROMPTS[0], None) for one in (*texts, both)), form=form)
        found = [wire.sample_of(one)[0] for one in wire.decode_request(body, form).samples]
        assert [(one.text, one.finish) for one in found[:4]] == [(one.text, one.finish) for one in texts]
        assert found[4].parts == ("image", "text")
    scorer = HttpScorer(urls=("http://127.0.0.1:1",))
    keys = [scorer._sample(one, PROMPTS[0]).key for one in (*texts, both, MEDIA[0], texts[0])]
    assert len(set(keys)) == 6 and keys[0] == keys[-1]
    for wrong_text, why in (({"text": "x" * (2**20 + 1)}, TOO_LONG), ({"text": "x", "finish": "cut"}, "Invalid enum")):
        with pytest.raises(wire.WireError, match=why):
            wire.decode_request(wrong(media={"text": wrong_text}), wire.MSGPACK)


def test_the_images_of_a_prompt_arrive_as_bytes_and_never_as_a_path():
    drawn = [drawn_image(media, "/etc/hostname") for media in MEDIA[:2]]
    prompts = [Prompt(0, "brighter", images=(one,)) for one in drawn]
    sent = [wire.sent_sample(MEDIA[1], prompt, None) for prompt in prompts]
    found = [wire.sample_of(one)[1] for one in sent]
    assert np.array_equal(read_prompt_image(found[0].images[0]).image, MEDIA[0].image)
    assert found[0].images[0].path == "image 0 of the prompt" and b"hostname" not in request_of(*sent)
    keys = [key_of(b"scorer", b"media", prompt) for prompt in found]
    assert keys[0] != keys[1] and keys == [key_of(b"scorer", b"media", prompt) for prompt in prompts]


def test_requests_that_wait_are_scored_together(serve):
    url = serve(HELD)
    with ThreadPoolExecutor(8) as pool:
        with held():
            calls = [pool.submit(ask, url, request_of(sample()))]
            assert Held.begun.wait(PATIENCE)
            calls += [pool.submit(ask, url, request_of(sample(i % 4))) for i in range(7)]
            wait_for(lambda: measured(url, "waiting 7.0"), "seven waiting requests")
        assert all(call.result()[0] == 200 for call in calls)
    assert sorted(map(len, Held.batches)) == [1, 7]


def test_a_sample_that_is_asked_for_again_is_scored_once(serve, client):
    score = client(url := serve())
    first = score()
    assert score(MEDIA[1:], PROMPTS[1:]) == first[1:]
    assert sum(map(len, Recorder.batches)) == 4
    score(MEDIA[:1], [Prompt(0, "another prompt")])
    assert sum(map(len, Recorder.batches)) == 5
    body = request_of(sample(), sample())  # without a key nothing is remembered
    assert ask(url, body)[0] == ask(url, body)[0] == 200
    assert sum(map(len, Recorder.batches)) == 9
    score = client(serve(remembered=0))
    for _ in range(3):
        score(MEDIA[:1], PROMPTS[:1])
    assert sum(map(len, Recorder.batches)) == 3


def test_a_prompt_without_what_a_scorer_needs_reaches_no_scorer(serve, client):
    score = client(url := serve({"name": "ocr"}))
    with pytest.raises(ScoreError, match='no text in "double quotes"') as raised:
        score(MEDIA[:1], [Prompt(0, "a cat")])
    assert not isinstance(raised.value, Outage)
    assert ask(url, method="GET", path="/health")[0] == 200
    assert score(MEDIA[:1], [Prompt(0, "a cat", "cat")])[0].parts.keys() >= {"ocr"}


def test_a_scorer_that_is_down_is_an_outage_and_answers_again(serve, client):
    url = serve(reward={"backoff_s": 0.05})
    score = client(url, retries=0)
    score(MEDIA[:1], PROMPTS[:1])
    Recorder.error = ConnectionError("the judge is away")
    with pytest.raises(Outage, match="the judge is away"):
        score(MEDIA[1:2], PROMPTS[1:2])
    Recorder.error = None
    assert client(url, retries=100, backoff_max_s=1.0)(MEDIA[1:2], PROMPTS[1:2])[0].text == "read"


# ---- who may ask, and how much ---------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_alone_unless_it_is_told_otherwise(serve):
    for server, address in (({}, "127.0.0.1"), ({"host": "127.0.0.2"}, "127.0.0.2")):
        assert listening_at(urlsplit(serve(**server)).port) == [address]


def test_only_the_token_opens_and_health_needs_none(serve, client, monkeypatch):
    compared, same = [], hmac.compare_digest

    def compare(given, token):
        compared.append((given, token))
        return same(given, token)

    monkeypatch.setattr(hmac, "compare_digest", compare)  # in constant time
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    url, known = serve(token="env:SERVE_TOKEN"), f"Bearer {TOKEN}"
    for given in ("", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer \xe9\xff"):
        for path in (wire.PATH, "/metrics", "/nowhere"):
            assert ask(url, request_of(sample()), path=path, Authorization=given)[0] == 401
        assert compared[-1] == (given.encode("latin-1"), known.encode())
    assert ask(url, method="GET", path="/health")[0] == 200
    assert Recorder.batches == []
    assert client(url, token=TOKEN)()
    assert ask(url, iter([b"x"]), Authorization=known)[0] == 411, "a body without a length"
    status, _, text = ask(url, method="GET", path="/metrics", Authorization=known)
    assert status == 200 and TOKEN not in text.decode()
    assert {
        'omni_async_reward_samples_total{outcome="scored"} 4.0',
        'omni_async_reward_requests_total{status="401"} 18.0',
        "omni_async_reward_up 1.0",
    } <= {*text.decode().splitlines()}


def test_too_many_requests_are_told_when_to_come_back(serve):
    url = serve(requests_per_s=0.01, burst=3)
    answers = [ask(url, request_of(sample()))[:2] for _ in range(4)]
    assert [status for status, _ in answers] == [200, 200, 200, 429]
    assert 0 < int(answers[-1][1]["Retry-After"]) <= 100
    limit = RateLimit(2.0, 2)
    assert [limit.wait_s("a", 0.0) for _ in range(3)] == [0, 0, 0.5]
    assert limit.wait_s("b", 0.0) == 0 and limit.wait_s("a", 0.5) == 0 and limit.wait_s("a", 0.5) == 0.5
    for i in range(5000):
        limit.wait_s(str(i), 1.0)
    assert len(limit._buckets) == 4096


def test_more_samples_than_may_wait_come_back_later_and_a_body_is_held_once(serve, client):
    url = serve(HELD, reward={"batch": 1}, max_waiting=2)
    with ThreadPoolExecutor(1) as pool:
        with held():
            first = pool.submit(ask, url, request_of(sample(), sample()))
            assert Held.begun.wait(PATIENCE)  # with one of the two
            bodies = [one._read_bytes for one in gc.get_objects() if type(one) is web.Request]
            assert bodies and not any(bodies)
            status, headers, body = ask(url, request_of(sample(), sample()))
            assert (status, headers["Retry-After"]) == (503, "1") and b"1 samples wait already" in body
            status, headers, body = ask(url, request_of(sample(), sample(), sample()))
            assert status == 413 and "Retry-After" not in headers and b"3 samples in one request" in body
            with pytest.raises(ScoreError, match="at most 2 may wait") as raised:
                client(url)()
            assert not isinstance(raised.value, Outage)
        assert first.result()[0] == 200


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
TOO_LONG = "a text of more than 1048576 characters"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metadata": {"x": [0] * 20_000}}, "metadata: more than 20000 values, or nested more than 50 deep"),
        ({"metadata": {"x": [0] * 300_000}}, "more than 250000 values"),
        ({"metadata": nested(51)}, "nested more than 50 deep"),
        ({"metadata": {"x": "x" * (2**20 + 1)}}, TOO_LONG),
        ({"metadata": {"x": ["é" * (2**20 + 1)]}}, TOO_LONG),
        ({"metadata": {"x": {"x" * (2**20 + 1): 1}}}, TOO_LONG),
        ({"metadata": {1: 2}}, "Expected `str`"),
        ({"metadata": {"x": {1: 2}}}, "metadata: keys are texts, got a int"),
        ({"metadata": {"x": float("inf")}}, "metadata: expected finite numbers"),
        ({"text": "x" * (2**20 + 1)}, TOO_LONG),
        ({"media": {"audio": SOUND}}, "audio: expected finite numbers"),
        ({"media": {"audio": SOUND | {"rate": float("nan")}}}, "Expected `float` > 0.0"),
    ],
)
def test_what_is_wrong_with_a_sample_is_named(changes, why):
    with pytest.raises(wire.WireError, match=why):
        wire.sample_of(wire.decode_request(wrong(**changes), wire.MSGPACK).samples[0])


def test_metadata_have_their_bounds_in_both_forms():
    wire.sample_of(wire.decode_request(wrong(metadata=nested(50)), wire.MSGPACK).samples[0])
    body = request_of(sample(), form=wire.JSON).replace(b'"red"', b"9" * 400)
    with pytest.raises(wire.WireError, match="expected integers of 64 bits"):
        wire.sample_of(wire.decode_request(body, wire.JSON).samples[0])

    def sent(metadata, form):
        body = request_of(wire.sent_sample(MEDIA[0], Prompt(0, "x", metadata=metadata), None), form=form)
        return wire.sample_of(wire.decode_request(body, form).samples[0])

    for text in ("\U0001f600" * 2**20, "x" * 2**20):
        for form in (wire.MSGPACK, wire.JSON):
            sent({"x": text, text: 1}, form)
    for metadata in ({"x": ["é" * (2**20 + 1)]}, {"x" * (2**20 + 1): 1}):
        with pytest.raises(wire.WireError, match="metadata: expected texts of 1048576 characters at most, got 1048577"):
            sent(metadata, wire.JSON)


def test_a_wrong_request_is_a_4xx_and_reaches_no_scorer(serve):
    """Malformed ones at random are in test_fuzzed_requests."""
    url = serve(max_request="16MiB")
    for body, status in (
        (b"\x91" * 100_000, 400),
        (request_of(), 400),
        (wrong(version=2), 400),
        (wrong(shape=[3, 8, 9]), 400),
        (wrong(shape=[2**31, 2**31, 2**31]), 400),
        (wrong(shape=[-3, -8, 8]), 400),
        (wrong(shape=[3, 0, 8], data=b""), 400),
        (wrong(shape=[8, 8, 3]), 400),
        (wrong(media={}), 400),
        (wrong(text=b"\xed\xa0\x80"), 400),
        (wrong(metadata={"x": b"bytes"}), 400),
        (wrong(metadata={"x": msgspec.msgpack.Ext(5, b"y")}), 400),
        (wrong(metadata={"x": [0] * 30_000}), 400),
        (b"x" * 20_000_000, 413),
    ):
        assert ask(url, body)[0] == status, body[:200]
    for how, status in (
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"path": "/../../etc/passwd"}, 404),
        ({"Content-Type": "application/x-pickle"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Length": "-1"}, 400),
        ({"X-Long": "x" * 10_000}, 400),
    ):
        answered, _, body = ask(url, request_of(sample()), **how)
        assert answered == status and (status == 400 or b"error" in body), how
    assert Recorder.batches == [] and ask(url, method="GET", path="/health")[0] == 200


def test_a_mistake_of_the_server_is_a_500_that_is_counted_and_told(serve, monkeypatch):
    async def broken(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Scoring, "score", broken)
    told = []
    status, _, body = ask(url := serve(tell=told.append), request_of(sample()))
    assert status == 500 and msgspec.msgpack.decode(body).keys() == {"error"} and b"a mistake" not in body
    assert measured(url, 'requests_total{status="500"} 1.0')
    assert len(told) == 1 and "a request failed: RuntimeError: a mistake" in told[0]


# ---- the file and the command ----------------------------------------------------------------------------------------

ON_DEVICE = "reward.scorers=[{name: tests.rewards.server.serving_world:OnDevice}]"


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
        ([ON_DEVICE, "placement.reward.gpus=1"], "placement.reward.gpus: 1"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, overrides, said):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setenv("SHORT_TOKEN", "short")
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    for name in DEVICES:
        monkeypatch.setenv(name, "3")
    assert cli.main(["serve-reward", str(write_scorers(tmp_path)), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert said in printed.err and "secret-in-the-file" not in printed.err


@pytest.mark.parametrize(("gpus", "devices"), [(0, ("", "")), (0.5, ("3", "5"))])
def test_scorers_without_gpus_find_no_device(tmp_path, monkeypatch, gpus, devices):
    for name, number in zip(DEVICES, "35", strict=True):
        monkeypatch.setenv(name, number)
    seen = []

    async def serve(*given):
        seen.append(tuple(os.environ[name] for name in DEVICES))
        return 0

    monkeypatch.setattr("omni_async.rewards.server.serve.serve", serve)
    assert cli.main(["serve-reward", str(write_scorers(tmp_path)), f"placement.reward.gpus={gpus}"]) == 0
    assert seen == [devices]


def test_the_page_has_every_key_of_a_server_with_its_default_and_its_file_is_right(tmp_path):
    page = ROOT / "docs" / "rewards" / "http.md"
    lines = [line.split("`") for line in page.read_text().splitlines() if line.startswith("| `server.")]
    shown = {name: "null" if default is None else str(default) for name, _, default in walk(Server, "server.")}
    assert {line[1]: line[3] for line in lines} == shown
    path = tmp_path / "scorers.yaml"
    path.write_text(next(blocks(page, "yaml")))
    assert load_server(path).reward.scorers[0].name == "ocr"


def test_sigterm_lets_a_request_under_way_finish(tmp_path):
    scorer = {"name": f"{HeldByFile.__module__}:HeldByFile", "params": {"folder": str(tmp_path)}}
    path = write_scorers(tmp_path, scorer, grace_s=2 * PATIENCE)
    with command(path) as (process, url), asking(url, retries=0, timeout_s=2 * PATIENCE) as score:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(score)
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
    with command(path) as (process, url), asking(url, retries=0) as score:
        while process.poll() is None:
            with pytest.raises(Outage):
                score(MEDIA[:1], PROMPTS[:1])
        assert process.returncode == 1
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("omni-async: the server ends: scorer ") and "calls have not returned" in last


async def test_a_lost_worker_leaves_no_request_waiting(monkeypatch):
    async def hangs(media, prompt, whole):
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
