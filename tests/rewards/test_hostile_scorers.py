"""Tests hostile scorers in a real thread: every sample that fails gets a reason, and no invalid number becomes a
score."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_async.aio.clock import WallClock
from omni_async.config.schema import Reward
from omni_async.rewards.base import ScoreError
from omni_async.rewards.checks import require_scores
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.guard import Failure
from omni_async.rewards.guard import Panel
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score
from tests.images import as_media

MEDIA = [as_media(np.full((4, 4, 3), i, np.uint8)) for i in range(3)]
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(3)]


class Says:
    """A scorer that returns the result of `answer` for the number of images."""

    name = "hostile"

    def __init__(self, answer: Callable[[int], Any]) -> None:
        self._answer = answer

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> Any:
        return self._answer(len(images))


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raises(error: BaseException) -> Callable[[int], Any]:
    def answer(count: int) -> Any:
        raise error

    return answer


def each(*args: Any, **kwargs: Any) -> Callable[[int], Any]:
    return lambda count: [Score(*args, **kwargs) for _ in range(count)]


def outcomes_of(answer: Callable[[int], Any], **reward: Any) -> list[Score | Failure]:
    async def main() -> list[Score | Failure]:
        async def report(text: str) -> None:
            """Ignores the report."""

        panel = Panel("reward-0", WeightedScorer.alone(Says(answer)), Reward(**reward), WallClock(), report)
        try:
            return await panel.score(MEDIA, PROMPTS)
        finally:
            panel.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(lambda count: None, "returned a NoneType, expected a list of Score", id="nothing"),
        pytest.param(lambda count: "1.0", "returned a str, expected a list of Score", id="a text"),
        pytest.param(
            lambda count: np.ones(count),
            r"returned a ndarray of shape \(\d,\), expected a list of Score",
            id="an array",
        ),
        pytest.param(lambda count: (Score(1.0) for _ in range(count)), "returned a generator", id="a generator"),
        pytest.param(lambda count: dict.fromkeys(range(count), Score(1.0)), "returned a dict", id="a dict"),
        pytest.param(lambda count: [], "returned 0 scores", id="no scores"),
        pytest.param(lambda count: [Score(1.0)] * (count + 1), "returned [42] scores for [31] samples", id="too many"),
        pytest.param(lambda count: [1.0] * count, "a float, expected a Score", id="numbers"),
        pytest.param(lambda count: [None] * count, "a NoneType, expected a Score", id="nones"),
        pytest.param(each(math.nan), "value is nan", id="nan"),
        pytest.param(each(-math.inf), "value is -inf", id="infinity"),
        pytest.param(each(np.float32("nan")), "value is nan", id="numpy's nan"),
        pytest.param(each(None), "value is a NoneType, expected a number", id="value none"),
        pytest.param(each("0.5"), "value is a str, expected a number", id="value text"),
        pytest.param(each(1j), "value is a complex, expected a number", id="value complex"),
        pytest.param(each(np.ones(3)), r"value is a ndarray of shape \(3,\), expected a number", id="value array"),
        pytest.param(
            each(np.ones(())), r"value is a ndarray of shape \(\), expected a number", id="value array without axes"
        ),
        pytest.param(each(10**400), "value is inf", id="value too large"),
        pytest.param(each(1.0, {"part": math.nan}), "part is nan", id="part nan"),
        pytest.param(each(1.0, {"part": None}), "part is a NoneType", id="part none"),
        pytest.param(each(1.0, None), "parts is a NoneType, expected a dict", id="no parts"),
        pytest.param(each(1.0, {1: 1.0}), "a part's name is a int, expected a str", id="unnamed part"),
        pytest.param(
            each(1.0, {"\ud800": 1.0}),
            r"a part is called '\\ud800', expected 1 to 100 characters",
            id="half a pair as name",
        ),
        pytest.param(each(1.0, {"a\x00b": 1.0}), r"a part is called 'a\\x00b'", id="control character in a name"),
        pytest.param(each(1.0, {"": 1.0}), "a part is called ''", id="empty name"),
        pytest.param(each(1.0, {"x" * 101: 1.0}), "a part is called 'x{100}'", id="long name"),
        pytest.param(each(1.0, {str(i): 1.0 for i in range(257)}), "257 parts, expected 256 at most", id="many parts"),
        pytest.param(each(1.0, {"part": 1e200}), "part is 1e[+]200, expected at most 1e[+]100", id="part too large"),
        pytest.param(each(1.0, text=b"x"), "text is a bytes", id="text bytes"),
        pytest.param(each(1.0, values=[1.0]), "values is a list", id="values list"),
        pytest.param(each(1.0, values=(1.0, math.nan)), r"values\[1\] is nan", id="values nan"),
        pytest.param(raises(ValueError("no")), "scorer 'hostile': ValueError: no", id="an exception"),
        pytest.param(raises(TimeoutError("socket")), "TimeoutError: socket", id="a timeout of its own"),
        pytest.param(raises(SystemExit(3)), "SystemExit: 3", id="sys.exit"),
        pytest.param(raises(KeyboardInterrupt()), "KeyboardInterrupt", id="an interrupt"),
        pytest.param(raises(StopIteration()), "StopIteration", id="StopIteration"),
        pytest.param(raises(asyncio.CancelledError()), "CancelledError", id="a cancellation"),
        pytest.param(raises(concurrent.futures.CancelledError()), "CancelledError", id="a future's cancellation"),
        pytest.param(raises(GeneratorExit()), "GeneratorExit", id="GeneratorExit"),
        pytest.param(raises(MemoryError()), "MemoryError", id="no memory"),
        pytest.param(
            raises(ValueError("\ud83d\x00\x1b[31m")), r"ValueError: \\ud83d\\x00\\x1b\[31m", id="unwritable words"
        ),
        pytest.param(
            raises(Speechless()), "Speechless: an exception that cannot be shown", id="an exception that raises"
        ),
    ],
)
def test_it_is_a_failure_with_a_reason(answer: Callable[[int], Any], reason: str) -> None:
    for outcome in outcomes_of(answer):
        assert isinstance(outcome, Failure)
        assert outcome.fault == "outage", "a scorer that never worked looks like one that is not there yet"
    for outcome in outcomes_of(answer, outage_s=0.0):
        assert isinstance(outcome, Failure) and outcome.fault == "retry"
        assert re.search(reason, outcome.reason), outcome.reason
        assert outcome.reason.encode().isascii() or outcome.reason.isprintable(), (
            "it goes into the ledger and onto consoles"
        )


def test_numbers_of_any_real_type_become_floats_that_can_be_written() -> None:
    scores = require_scores(
        "x", (Score(np.float32(0.5), {"part": np.int64(3)}), Score(2), Score(np.float64(1))), PROMPTS
    )
    assert scores == [Score(0.5, {"part": 3.0}), Score(2.0), Score(1.0)]
    assert {type(score.value) for score in scores} == {float} and type(scores[0].parts["part"]) is float
    assert msgspec.json.decode(msgspec.json.encode(scores), type=list[Score]) == scores


class Words(str):
    """A text that is no plain str."""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param("half \ud83d a pair \udc00", "half \ufffd a pair \ufffd", id="surrogates"),
        pytest.param("a\x00b\x1b[31mc\x7f\x85", "a\ufffdb\ufffd[31mc\ufffd\ufffd", id="control characters"),
        pytest.param("x" * 10**6, "x" * 2000 + "...", id="gigantic"),
        pytest.param("两\n行\u3000\t\U0001f600", "两\n行\u3000\t\U0001f600", id="any language"),
        pytest.param(Words("yes"), "yes", id="a kind of str"),
        pytest.param(np.str_("yes"), "yes", id="numpy's"),
    ],
)
def test_a_text_is_kept_as_far_as_it_can_be_written(text: str, kept: str) -> None:
    for outcome in outcomes_of(each(1.0, text=text)):
        assert isinstance(outcome, Score)
        assert outcome.text == kept and type(outcome.text) is str
        assert msgspec.json.decode(msgspec.json.encode(outcome), type=Score) == outcome


def test_part_names_of_any_kind_of_str_are_plain() -> None:
    for outcome in outcomes_of(each(1.0, {np.str_("part"): True})):
        assert isinstance(outcome, Score)
        assert outcome.parts == {"part": 1.0} and {type(name) for name in outcome.parts} == {str}


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_an_asynchronous_scorer_is_reported_in_one_line() -> None:
    async def score() -> list[Score]:
        return []

    with pytest.raises(ScoreError, match="scorer 'x' is asynchronous: score must be a plain method"):
        require_scores("x", score(), [Prompt(0, "a")])


@pytest.mark.parametrize("value", [1e30, -1e30, 1.1e6, sys.float_info.max])
def test_an_absurd_score_is_a_final_failure_and_not_the_scorers_outage(value: float) -> None:
    for outcome in outcomes_of(each(value)):
        assert isinstance(outcome, Failure) and outcome.fault == "reject"
        assert f"a reward of {value:g}, beyond reward.max_abs = 1e+06" in outcome.reason
    assert outcomes_of(each(1e6)) == [Score(1e6, values=(1e6,))] * 3
    assert (
        outcomes_of(each(11.0), max_abs=10.0)
        != outcomes_of(each(11.0), max_abs=11.0)
        == [Score(11.0, values=(11.0,))] * 3
    )


def test_a_servers_error_page_is_cut_to_a_line() -> None:
    for outcome in outcomes_of(raises(OSError("<html>\n" + "x" * 10_000))):
        assert isinstance(outcome, Failure)
        assert len(outcome.reason) == 300 and "\n" not in outcome.reason and outcome.reason.endswith("x...")


def test_a_call_that_hangs_leaves_its_thread_behind_and_the_next_call_has_another() -> None:
    go = threading.Event()
    names: list[str] = []

    def answer(count: int) -> list[Score]:
        names.append(threading.current_thread().name)
        if len(names) == 1:
            go.wait(20)
        return [Score(1.0)] * count

    assert outcomes_of(answer, timeout_s=0.05) == [Score(1.0, values=(1.0,))] * 3
    assert len(names) == 4, "the batch that hung, and its samples"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward-0/hostile"), (
        "the process can end without it"
    )
    go.set()


def test_calls_that_do_not_overlap_share_one_thread() -> None:
    async def main() -> set[int]:
        threads = Threads("t")
        used = {await threads.run(threading.get_ident) for _ in range(20)}
        assert threads.busy == 0
        first, second = threading.Event(), threading.Event()
        both = threads.run(lambda: (first.set(), second.wait(10))), threads.run(lambda: (second.set(), first.wait(10)))
        assert threads.busy == 2
        await asyncio.gather(*both)
        assert threads.busy == 0
        used.add(await threads.run(threading.get_ident))
        threads.close()
        return used

    before = threading.active_count()
    assert len(asyncio.run(main())) <= 2
    for _ in range(200):
        if threading.active_count() <= before:
            break
        threading.Event().wait(0.01)
    assert threading.active_count() <= before, "closing ends idle threads"
