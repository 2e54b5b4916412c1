"""Tests the scorer `http` and its protocol, with servers that answer wrongly; test_model_servers has whom it asks."""

import contextlib
import json
import re
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile

from examples import brightness_server
from omni_async.config import reward as sections
from omni_async.data.audio_files import prompt_audio, read_prompt_audio
from omni_async.data.image_files import digest_of
from omni_async.rewards import registry, wire
from omni_async.rewards.base import Outage, ScoreError, require_scores
from omni_async.rewards.scorers.http import HttpScorer
from omni_async.types import Prompt, PromptVideo
from tests.rewards.judge_server import judging
from tests.rewards.server.serving_world import MEDIA, PROMPTS, ROOT, served, write_scorers
from tests.test_documented import blocks

PAGE = ROOT / "docs" / "rewards" / "http.md"


@contextlib.asynccontextmanager
async def asking(url, **params):
    scorer = HttpScorer(urls=(url,), **{"backoff_s": 0.01, "backoff_max_s": 0.05, "retries": 1} | params)
    try:
        yield scorer
    finally:
        await scorer.close()


async def answered(reply, count=1, **params):
    async with judging(lambda body, n: reply) as server, asking(server.url, **params) as scorer:
        return require_scores("http", await scorer.score(MEDIA[:count], PROMPTS[:count]), PROMPTS[:count])


def packed(*outcomes, version=1):
    return msgspec.msgpack.encode({"version": version, "scores": outcomes})


GOOD = packed({"value": 0.5})


async def test_a_busy_server_is_asked_again_with_the_same_keys():
    busy = 503, msgspec.msgpack.encode({"error": "loading"})
    async with judging(lambda body, n: GOOD if n == 2 else busy) as server, asking(server.url) as scorer:
        assert (await scorer.score(MEDIA[:1], PROMPTS[:1]))[0].value == 0.5
    first, second = server.asked
    assert first == second and wire.decode_request(first, wire.MSGPACK).samples[0].key
    for reply, said in ((busy, "answered 503: loading"), ((503, b"<html>"), r"answered 503 \(asked")):
        with pytest.raises(Outage, match=said):
            await answered(reply)


NO_ANSWER = "sent no answer of the protocol"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", NO_ANSWER),
        (b"<html>", NO_ANSWER),
        (GOOD[:-3], NO_ANSWER),
        (b"\x91" * 100_000, NO_ANSWER),
        (b"\xdf\xff\xff\xff\xff", NO_ANSWER),
        (packed(version=2), NO_ANSWER),
        (packed({"value": "1.0"}), NO_ANSWER),
        (packed({"value": [1.0]}), NO_ANSWER),
        (packed({"value": True}), NO_ANSWER),
        (packed({"value": 1, "parts": [1]}), NO_ANSWER),
        (packed({"value": 1, "text": "T"}).replace(b"\xa1T", b"\xa3\xed\xa0\x80"), NO_ANSWER),
        (packed(), "0 scores for 1 samples"),
        (packed({"value": 1}, {"value": 1}), "2 scores for 1 samples"),
        (packed({}), "neither a value nor an error"),
        (packed({"error": "bad\n" * 10_000}), r"^bad bad .{290,}\.\.\.$"),
        (packed({"error": "https://me:hunter2@h failed"}), r"^https://\*\*\*@h failed$"),
        (packed({"value": float("nan")}), "value is nan"),
        (packed({"value": float("inf")}), "value is inf"),
        (packed({"value": 1, "parts": {"p" * 1000: 1}}), "a part is called"),
        (packed({"value": 1, "parts": {str(i): 1 for i in range(1000)}}), "1000 parts"),
        *((b'{"version":1,"scores":[{"value":%s}]}' % one, NO_ANSWER) for one in (b"NaN", b"1e999", b'"\\ud800"')),
    ],
)
async def test_a_wrong_answer_is_an_error_and_never_a_number(body, said):
    with pytest.raises(ScoreError, match=said) as raised:
        await answered(body, form="json" if body.startswith(b"{") else "msgpack")
    assert not isinstance(raised.value, Outage)


async def test_a_megabyte_of_text_is_cut_and_an_outage_of_one_sample_is_an_outage():
    [score] = await answered(packed({"value": 1, "text": "x" * 2**20}))
    assert len(score.text) < 2100
    with pytest.raises(Outage, match="away"):
        await answered(packed({"error": "unreadable"}, {"error": "away", "kind": "outage"}), count=2)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "ftp://x", "http://user:password@x", "http://x?token=1", "http://x\n", "file:///etc/passwd"]
)
def test_a_url_that_is_none_or_holds_a_credential_is_refused(url):
    with pytest.raises(registry.ScorerConfigError, match="parameter 'urls'"):
        registry.build(sections.Scorer(name="http", params={"urls": [url]}))


def test_the_token_reaches_no_message(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "sesame-sesame-sesame")
    config = sections.Scorer(name="http", params={"urls": ["http://127.0.0.1:1"], "token": "env:A_TOKEN"})
    assert registry.secrets_of(config) == {"sesame-sesame-sesame"}
    assert registry.concurrency_of(config) is None


def test_the_documented_server_is_short():
    assert "(../../examples/brightness_server.py)" in PAGE.read_text(encoding="utf-8")
    source = Path(brightness_server.__file__).read_text(encoding="utf-8")
    assert len([line for line in source.splitlines() if line.strip()]) <= 32


async def test_the_documented_server_scores(monkeypatch):
    server = brightness_server.ThreadingHTTPServer(("127.0.0.1", 0), brightness_server.Handler)
    monkeypatch.setattr(brightness_server.Handler, "log_message", lambda *_: None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        async with asking(f"http://127.0.0.1:{server.server_port}", form="json") as scorer:
            scores = await scorer.score(MEDIA, PROMPTS)
            assert [one.value for one in scores] == pytest.approx([one.image.mean() / 255 for one in MEDIA])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_documented_messages_are_those_of_the_protocol():
    request, answer = blocks(PAGE, "json")
    sent = json.loads(request)
    image = sent["samples"][0]["media"]["image"]
    image["data"] = "AAAA" * (3 * 64 * 64 // 3)
    asked = wire.decode_request(json.dumps(sent).encode(), wire.JSON)
    media, prompt = wire.sample_of(asked.samples[0])
    assert media.image.shape == (3, 64, 64) and re.search('"open"', prompt.text) and prompt.target == "open"
    assert [one.kind for one in wire.decode_answer(answer.encode(), wire.JSON).scores] == ["sample", "sample"]


class Listener:
    name, accepts = "listener", ("image",)

    def score(self, media, prompts):
        return [sum(float(read_prompt_audio(one, 8000).max()) for one in prompt.audio) for prompt in prompts]


async def test_a_server_gets_the_audio_and_the_video_of_a_prompt(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.linspace(0, 0.5, 800), 8000)
    one = prompt_audio(tmp_path / "a.wav", "a.wav")
    filmed = PromptVideo("a.mp4", digest_of(b"film"), b"film")
    prompts = [Prompt(0, "twice", audio=(one, one), video=(filmed,)), Prompt(1, "none")]
    sent = [wire.sent_sample(MEDIA[0], prompt, None) for prompt in prompts]
    assert [wire.sample_of(one)[1].content for one in sent] == [prompt.content for prompt in prompts]
    # A server of an earlier version gets its own messages while no prompt has audio or video.
    assert not {"audio", "video"} & msgspec.to_builtins(sent[1])["prompt"].keys()
    many = msgspec.structs.replace(sent[0].prompt, audio=(b"",) * 17)
    asked = wire.Request(1, (msgspec.structs.replace(sent[0], prompt=many),))
    with pytest.raises(wire.WireError, match="length <= 16"):
        wire.decode_request(wire.encode(asked, wire.MSGPACK), wire.MSGPACK)
    with served(write_scorers(tmp_path, {"name": f"{__name__}:Listener"})) as url:
        async with asking(url) as scorer:
            scores = await scorer.score(MEDIA[:2], prompts)
    assert [score.value for score in scores] == Listener().score(MEDIA[:2], prompts) == [pytest.approx(1, abs=0.01), 0]
