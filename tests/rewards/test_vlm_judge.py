"""Tests the judge against a scripted server with known answers: what is asked, how answers are read, whom it asks, and
that no fault of a server becomes a number."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_async.config import schema
from omni_async.data.image_files import drawn_image
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import Outage, ScoreError
from omni_async.rewards.scorers.vlm_judge import VlmJudgeScorer
from omni_async.types import Prompt, Score
from tests.rewards.judge_server import JudgeServer, completion, judging
from tests.support.images import as_media
from tests.support.moved_clock import move_clock, on_a_moved_clock
from tests.support.patience import PATIENCE

IMAGE = as_media(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
CAT = Prompt(0, 'a cat with "OPEN" on it', "OPEN", {"style": "ink"})
YES = completion("Yes", ("Yes", 1.0), ("No", 1.0))


@contextlib.asynccontextmanager
async def judge(*servers: JudgeServer, **params: Any) -> AsyncIterator[VlmJudgeScorer]:
    scorer = VlmJudgeScorer(
        **{"model": "m", "urls": tuple(one.url for one in servers), "backoff_s": 0.01, "backoff_max_s": 0.05} | params
    )
    try:
        yield scorer
    finally:
        await scorer.close()


async def answered(reply: Any, prompt: Prompt = CAT, media: Media = IMAGE, **params: Any) -> Score:
    async with judging(lambda body, n: reply) as server, judge(server, retries=0, **params) as scorer:
        (score,) = await scorer.score([media], [prompt])
        return score


# ---- what is asked ---------------------------------------------------------------------------------------------------


async def test_the_image_and_the_filled_in_prompt_are_sent_and_the_cost_is_a_part():
    async with (
        judging(lambda body, n: YES) as server,
        judge(server, prompt="{{}} {style}: {prompt}", system="Be strict.", token="a-secret-token") as scorer,
    ):
        (score,) = await scorer.score([IMAGE], [CAT])
    assert score == Score(0.5, {"prompt_tokens": 100.0, "completion_tokens": 2.0}, "Yes")
    (asked,) = server.asked
    system, user = asked["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    image, text = user["content"]
    assert text["text"] == '{} ink: a cat with "OPEN" on it'
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), IMAGE.pixels)
    assert (asked["model"], asked["temperature"], asked["logprobs"], asked["top_logprobs"]) == ("m", 0.0, True, 20)
    assert server.headers[0]["Authorization"] == "Bearer a-secret-token"


async def test_frames_of_a_video_are_sent_evenly_and_large_ones_smaller():
    video = Media(video=np.arange(9, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 32, 64), np.uint8), fps=8)
    async with judging(lambda body, n: YES) as server, judge(server, frames=3, side=32, image_format="jpeg") as scorer:
        await scorer.score([video], [CAT])
    *frames, _ = server.asked[0]["messages"][0]["content"]
    found = [Image.open(io.BytesIO(base64.b64decode(f["image_url"]["url"].partition(",")[2]))) for f in frames]
    assert [one.size for one in found] == [(32, 16)] * 3
    assert [round(float(np.asarray(one).mean())) for one in found] == [0, 4, 8]


@pytest.mark.parametrize(
    ("params", "prompt", "lacks"),
    [
        ({"prompt": "{language}?"}, CAT, "the prompt has no language, which the judge's prompt names"),
        ({"prompt": "{target}"}, Prompt(0, "x"), "the prompt has no target, which"),
        ({"mode": "text"}, Prompt(0, "x"), "the prompt has no `target` and no text"),
        ({"mode": "pairwise"}, CAT, "the prompt has no image to compare the sample with"),
        ({"mode": "rating", "prompt": "{lowest} to {highest}: {style}"}, CAT, None),
    ],
)
def test_what_a_prompt_lacks_is_found_before_the_run(params, prompt, lacks):
    check = registry.prompt_check(
        schema.Scorer(name="vlm_judge", params={"model": "m", "urls": ["http://a"], **params})
    )
    found = check(prompt)
    assert found is None if lacks is None else lacks in found


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"prompt": "{prompt"}, "a brace itself is written twice"),
        ({"prompt": "{0}"}, "expected fields like {prompt}"),
        ({"prompt": "{prompt.__class__}"}, "expected fields like {prompt}"),
        ({"prompt": "{prompt!r}"}, "expected fields like {prompt}"),
        ({"urls": []}, "give urls, or the name of a server"),
        ({"lowest": 5.0, "highest": 5.0}, "highest: expected more than lowest = 5"),
        ({"token": "a\nb"}, "token: expected printable ASCII"),
    ],
)
def test_a_judge_that_could_not_ask_is_not_built(params, why):
    with pytest.raises(ValueError, match=why):
        VlmJudgeScorer(**{"model": "m", "urls": ("http://a",)} | params)


# ---- how answers are read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tops", "value"),
    [
        ([("Yes", 0.6), ("No", 0.2)], 0.75),
        ([(" yes", 0.3), ("YES", 0.3), ("No", 0.1), ("no.", 0.1), ("Maybe", 0.2)], 0.75),
        ([("No", 0.9)], 0.0),
        ([("yes", 0.12), ("Well", 0.8)], 1.0),
    ],
)
async def test_yes_is_the_probability_of_all_its_spellings(tops, value):
    assert (await answered(completion("Yes", *tops))).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10", 1.0), ("1", 0.0), (" 5.5 ", 0.5), ("Score: 7", 6 / 9), ("**Rating = 4.0.**", 3 / 9),
     ('{"score": 7}', 6 / 9), ('{"rating": 7.0, "reason": "3 cats"}', 6 / 9)],
)  # fmt: skip
async def test_a_rating_is_one_number_in_the_range(text, value):
    assert (await answered(completion(text), mode="rating")).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("mode", "reply", "why"),
    [
        (
            "yes_no",
            completion("Maybe", ("Maybe", 0.9)),
            "'yes' and 'no' have a probability of 0, expected at least 0.1",
        ),
        (
            "yes_no",
            completion("Well", ("Well", 0.9), ("no", 0.06), ("yes", 0.02)),
            r"probability of 0.08, .*'Well' \(0.9",
        ),
        ("yes_no", completion("Yes"), "the server sends no log-probabilities"),
        ("rating", completion("seven"), "expected one number from 1 to 10, got 'seven'"),
        ("rating", completion("7 or 8"), "expected one number from 1 to 10, got '7 or 8'"),
        ("rating", completion("I see 5 fingers."), "expected one number from 1 to 10, got 'I see 5"),
        ("rating", completion('{"score": null, "cats": 5}'), "expected one number"),
        ("rating", completion('{"score": 7, "rating": 3}'), "expected one number"),
        ("rating", completion('{"score": 7'), "expected one number"),
        ("rating", completion(f'{{"score": {"9" * 400}}}'), "expected one number"),
        ("rating", completion("11"), "expected a number from 1 to 10, got 11"),
        ("rating", completion("-3"), "expected a number from 1 to 10, got -3"),
        ("rating", completion('{"score": true}'), "expected one number"),
        ("rating", completion("1", finish="length"), "cut off at max_tokens"),
        ("rating", completion(""), "expected one number from 1 to 10, got ''"),
    ],
)
async def test_an_answer_that_is_not_clear_is_an_error(mode, reply, why):
    with pytest.raises(ScoreError, match=why) as raised:
        await answered(reply, mode=mode)
    assert not isinstance(raised.value, Outage)


async def test_yes_may_be_read_from_the_text_where_the_recipe_says_so():
    assert (await answered(completion("Yes, it does."), from_text=True)).value == 1.0
    assert (await answered(completion(" no"), from_text=True)).value == 0.0
    with pytest.raises(ScoreError, match="says neither 'yes' nor 'no'"):
        await answered(completion("Perhaps"), from_text=True)


@pytest.mark.parametrize(("text", "value"), [("open", 1.0), ("The sign: OPEN!", 1.0), ("OPFN", 0.75), ("", 0.0)])
async def test_what_the_judge_read_is_compared_with_the_wanted_text(text, value):
    assert (await answered(completion(text), mode="text")).value == value


async def test_a_pair_is_asked_in_both_orders():
    replies = [completion("A", ("A", 0.8), ("B", 0.2)), completion("A", ("A", 0.6), ("B", 0.4))]
    drawn = drawn_image(as_media(np.zeros((40, 60, 3), np.uint8)), "reference")
    async with judging(lambda body, n: replies[n - 1]) as server, judge(server, mode="pairwise") as scorer:
        (score,) = await scorer.score([IMAGE], [Prompt(0, "a cat", images=(drawn,))])
    first, second = ([part["image_url"]["url"] for part in one["messages"][0]["content"][:2]] for one in server.asked)
    assert first == second[::-1] and first[0] != first[1]
    assert score.value == pytest.approx((0.8 + 0.4) / 2) and score.parts["prompt_tokens"] == 200.0


# ---- who answers -----------------------------------------------------------------------------------------------------

# As vLLM lists two names of one model, a LoRA for it, and another model that a router adds.
LISTED = {
    "object": "list",
    "data": [
        {"id": "first", "root": "/models/vl", "parent": None},
        {"id": "m", "root": "/models/vl", "parent": None},
        {"id": "style", "root": "/loras/style", "parent": "first"},
        {"id": "other", "root": "/models/other"},
    ],
}


async def answered_by(name: str | None, asked: str = "m", listed: Any = None, **params: Any) -> Score:
    async with (
        judging(lambda body, n: {**YES, "model": name}) as server,
        judge(server, model=asked, retries=0, **params) as scorer,
    ):
        server.models = listed
        at_once = (scorer.score([IMAGE], [CAT]) for _ in range(3))
        first = await asyncio.gather(*at_once, return_exceptions=True)
        (score,) = await scorer.score([IMAGE], [CAT])
    assert first == [[score]] * 3 and len(server.asked) <= 7, "names are learned once"
    return score


@pytest.mark.parametrize(
    ("name", "asked", "listed"),
    [
        ("m", "m", None),
        (None, "m", None),
        ("", "m", None),
        ("gpt-4o-2024-08-06", "gpt-4o", None),
        ("gpt-4-0613", "gpt-4", None),
        ("claude-sonnet-4-20250514", "claude-sonnet-4-latest", None),
        ("first", "m", LISTED),
        ("/models/vl", "m", LISTED),
        ("first", "style", LISTED),
    ],
)
async def test_the_judge_may_answer_by_another_of_its_names(name, asked, listed):
    assert (await answered_by(name, asked, listed)).value == 0.5


@pytest.mark.parametrize(
    ("name", "asked", "listed"),
    [
        ("other", "m", None),
        ("other", "m", LISTED),
        ("style", "m", LISTED),
        ("gpt-4o-mini", "gpt-4o", None),
        ("gpt-4o-mini-2024-07-18", "gpt-4o", None),
        ("qwen-vl-72", "qwen-vl", None),
        ("other", "m", {"data": "none"}),
        ("other", "m", {"data": [{"id": "m", "root": None}, {"id": "other", "root": None}]}),
    ],
)
async def test_the_answer_of_another_model_is_an_error(name, asked, listed):
    with pytest.raises(ScoreError, match=rf"http://\S+ answered as '{name}', asked for '{asked}'; .*params.answers_as"):
        await answered_by(name, asked, listed)


async def test_a_name_that_no_server_lists_can_be_given():
    assert (await answered_by("Vendor/VL-8B", answers_as="Vendor/VL-8B")).value == 0.5


# ---- whom it asks, and faults ----------------------------------------------------------------------------------------


async def test_the_server_with_the_fewest_questions_is_asked():
    all_asked = asyncio.Event()

    async def slow(body: Any, n: int) -> Any:
        if len(one.asked) + len(other.asked) == 20:
            all_asked.set()
        await all_asked.wait()
        return YES

    async with judging(slow) as one, judging(slow) as other, judge(one, other) as scorer:
        await asyncio.gather(*(scorer.score([IMAGE], [CAT]) for _ in range(20)))
    assert (one.most, other.most) == (10, 10) and len(one.asked) == len(other.asked) == 10


async def test_addresses_of_a_role_are_asked_for_with_their_tokens_and_again_when_one_is_gone():
    calls: list[str] = []
    async with judging(lambda body, n: YES) as server, judging(lambda body, n: YES) as spare:
        found = {"qwen-0": server.url.replace("//", "//:sesame@")}

        async def addresses(role: str) -> dict[str, str]:
            calls.append(role)
            return found

        async with judge(urls=(), server="qwen", retries=1) as scorer:
            scorer.connect(addresses)
            await scorer.score([IMAGE], [CAT])
            assert calls == ["qwen"] and server.headers[0]["Authorization"] == "Bearer sesame"
            await scorer.score([IMAGE], [CAT])
            assert calls == ["qwen"], "the address is known"
            server.answer = lambda body, n: (503, {})
            found = {"qwen-0.2": spare.url}
            await scorer.score([IMAGE], [CAT])
            assert len(spare.asked) == 1 and "Authorization" not in spare.headers[0]
        async with judge(urls=(), server="qwen") as scorer:
            with pytest.raises(ScoreError, match="the servers of 'qwen' are started by a run"):
                await scorer.score([IMAGE], [CAT])


@on_a_moved_clock
async def test_a_server_that_hangs_is_hedged_and_soon_asked_last():
    over = asyncio.Event()

    async def stuck(body: Any, n: int) -> Any:
        move_clock(PATIENCE)
        await over.wait()
        return YES

    async with (
        judging(stuck) as one,
        judging(lambda body, n: YES) as other,
        judge(one, other, hedge_s=PATIENCE, timeout_s=100 * PATIENCE) as scorer,
    ):
        for _ in range(40):  # whom of two idle servers it asks is drawn
            (score,) = await scorer.score([IMAGE], [CAT])
            assert score.value == 0.5
        over.set()
    assert len(one.asked) == 3 and len(other.asked) == 40


FAULTS: list[tuple[Any, str, bool]] = [
    ((429, {"error": {"message": "slow\ndown"}}, {"Retry-After": "0"}), "answered 429: slow down", True),
    ((500, b"<html>oops</html>"), "answered 500", True),
    ((404, {"error": {"message": "The model `m` does not exist."}}), "answered 404: The model `m` does not", False),
    ((401, {"error": "who are you"}), "answered 401: who are you", False),
    ((302, b"", {"Location": "http://127.0.0.1:1/"}), "answered 302", False),
    (json.dumps(YES).encode()[:-9], "sent no chat completion", False),
    (b'{"choices": [{"message": {"content": "\\ud83d"}}]}', "sent no chat completion", False),
    ({"choices": []}, "a chat completion without a choice", False),
    ({"choices": [{"message": {"content": None, "refusal": "I cannot"}}]}, "completion without a text", False),
    (b" " * (2**26 + 1), "more than 67108864 bytes", False),
    (b"[" * 100_000, "sent no chat completion", False),
]


@pytest.mark.parametrize(("reply", "said", "is_outage"), FAULTS, ids=lambda one: str(one)[:24])
async def test_a_servers_fault_is_an_error_that_names_it_and_never_a_number(reply, said, is_outage):
    with pytest.raises(ScoreError, match=said) as raised:
        await answered(reply, token="sesame-sesame")
    assert isinstance(raised.value, Outage) is is_outage
    assert "sesame" not in str(raised.value) and "\n" not in str(raised.value)


async def test_a_fault_that_passes_is_asked_again_without_the_servers_cookies():
    replies = [(503, {}), (429, {}, {"Retry-After": "1"}), b"{", YES]
    async with judging(lambda body, n: replies[n - 1]) as server, judge(server, retries=3) as scorer:
        (score,) = await scorer.score([IMAGE], [CAT])
    assert score.value == 0.5 and len(server.asked) == 4
    assert not any("Cookie" in headers for headers in server.headers)


async def test_no_redirect_is_followed_and_nothing_is_decompressed():
    async with judging(lambda body, n: YES) as other:
        with pytest.raises(ScoreError, match="answered 307"):
            await answered((307, {}, {"Location": other.url + "/v1/chat/completions"}), token="sesame-sesame")
        assert not other.asked
    packed = gzip.compress(json.dumps(YES).encode())
    with pytest.raises(ScoreError, match="sent no chat completion"):
        await answered((200, packed, {"Content-Encoding": "gzip"}))


async def test_a_server_that_lists_other_names_every_time_is_not_remembered():
    def lists(number: int) -> dict[str, Any]:
        return {"data": [{"id": name, "root": "r"} for name in ("m", *(f"{number}-{i}" for i in range(600)))]}

    async with judging(lambda body, n: {**YES, "model": "another"}) as server, judge(server, retries=0) as scorer:
        for number in range(3):
            server.models = lists(number)
            with pytest.raises(ScoreError, match="answered as 'another'"):
                await scorer.score([IMAGE], [CAT])
        assert len(scorer._names) <= 1000


async def test_a_slow_answer_is_waited_for_and_asked_for_once():
    async def slow(body: Any, n: int) -> Any:
        await asyncio.sleep(0.3)
        return YES

    async with judging(slow) as server, judge(server) as scorer:
        (score,) = await scorer.score([IMAGE], [CAT])
    assert score.value == 0.5 and len(server.asked) == 1


@on_a_moved_clock
async def test_a_megabyte_of_talk_is_read_and_a_hang_is_left():
    long = completion("y" * 2**20, ("yes", 0.5), ("no", 0.5))
    assert (await answered(long)).value == pytest.approx(0.5)

    over = asyncio.Event()

    async def hang(body: Any, n: int) -> Any:
        move_clock(PATIENCE)
        await over.wait()
        return YES

    async with judging(hang) as server, judge(server, timeout_s=PATIENCE, retries=1) as scorer:
        with pytest.raises(Outage, match=r"did not answer within 60 s \(asked 2 times\)"):
            await scorer.score([IMAGE], [CAT])
        over.set()
