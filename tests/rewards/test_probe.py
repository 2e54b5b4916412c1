"""Tests that a scorer is tried before any sample is drawn, on virtual time: a wrong one is reported at once, one that
is down is waited for."""

from __future__ import annotations

import asyncio
import io
import urllib.error
from collections.abc import Callable
from email.message import Message
from typing import Any

import numpy as np
import pytest
from test_guard import HANGS, Judge, VirtualThreads, now, play

from omni_async.config import with_spec
from omni_async.config.schema import Reward
from omni_async.media import require_media
from omni_async.rewards.base import Outage, ScoreError
from omni_async.rewards.composition import Member, WeightedScorer
from omni_async.rewards.guard import Failure
from omni_async.rewards.failures import is_outage
from omni_async.rewards.guard import Panel
from omni_async.rewards.probe import Probe
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.types import Prompt, Score
from tests.control.control_world import make_config
from tests.images import as_media

PROBE = Probe.of(with_spec(make_config()), [Prompt(0, "a cat", metadata={"colour": "red"}), Prompt(1, "a dog")])


class Scripted(Judge):
    """A scorer whose call number n does what `says(n)` does; the first call is number 1."""

    def __init__(self, says: Callable[[int], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._says = says

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.calls.append((now(), [prompt.index for prompt in prompts]))
        said = self._says(len(self.calls))
        if isinstance(said, BaseException):
            raise said
        return [Score(said) for _ in images]


class Trial:
    """A panel with a probe."""

    def __init__(self, *judges: Judge, **reward: Any) -> None:
        self.reports: list[str] = []
        threads = {f"p/{number}": VirtualThreads(judge) for number, judge in enumerate(judges)}
        weighted = WeightedScorer.alone(judges[0])
        weighted.members = [Member(str(number), 1.0, judge) for number, judge in enumerate(judges)]
        self.panel = Panel("p", weighted, Reward(**reward), VirtualClock(), self.report, threads.__getitem__, PROBE)

    async def report(self, text: str) -> None:
        self.reports.append(text)

    async def score(self, *pixels: int) -> list[Score | Failure]:
        images = [as_media(np.full((2, 2, 3), pixel, np.uint8)) for pixel in pixels]
        return await self.panel.score(images, [Prompt(pixel, "a cat") for pixel in pixels])


def typo(call: int) -> AttributeError:
    return AttributeError("'Judge' object has no attribute '_tresh'")


# ---- the synthetic sample --------------------------------------------------------------------------------------------


def test_it_is_two_images_of_the_runs_size_with_its_first_prompts() -> None:
    assert PROBE is not None
    require_media(PROBE.media, with_spec(make_config()).rollout.sampling)
    first, second = (media.pixels for media in PROBE.media)
    assert first.shape == (512, 512, 3) and not np.array_equal(first, second) and (first.min(), first.max()) == (0, 255)
    assert [(prompt.text, prompt.metadata) for prompt in PROBE.prompts] == [("a cat", {"colour": "red"}), ("a dog", {})]


# ---- wrong, or down --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "words"),
    [
        pytest.param(typo, "AttributeError: 'Judge' object has no attribute '_tresh'", id="misspelt attribute"),
        pytest.param(
            lambda call: float("nan"), "sample 0 (prompt 0: 'a cat'): value is nan, expected a finite number", id="nan"
        ),
        pytest.param(lambda call: "0.5", "value is a str, expected a number", id="wrong type"),
        pytest.param(
            lambda call: RuntimeError("no such layer"), "RuntimeError: no such layer", id="anything that stays the same"
        ),
        pytest.param(
            lambda call: FileNotFoundError("weights.pt"), "FileNotFoundError: weights.pt", id="a file that is not there"
        ),
        pytest.param(
            lambda call: ValueError(f"<Tensor at 0x7f{call}a>"),
            "ValueError: <Tensor at 0x7f2a>",
            id="but for addresses",
        ),
        pytest.param(lambda call: SystemExit(3), "SystemExit: 3", id="sys.exit"),
    ],
)
def test_one_that_fails_twice_in_the_same_way_is_wrong_and_said_so_at_once_in_its_own_words(
    says: Callable[[int], Any], words: str
) -> None:
    async def main() -> None:
        trial = Trial(judge := Scripted(says))
        wrong = await trial.panel.try_out()
        assert wrong is not None and words in wrong and "reward.probe=false" in wrong
        assert now() == 0 and len(judge.calls) == 2

    play(main())


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda call: ConnectionRefusedError("nobody listens"), id="nobody listens"),
        pytest.param(lambda call: Outage("still loading"), id="it says so itself"),
        pytest.param(lambda call: RuntimeError(f"request {call} failed"), id="words that change"),
        pytest.param(lambda call: MemoryError("no room") if call == 2 else typo(call), id="two kinds"),
    ],
)
def test_one_that_is_down_or_changes_its_words_is_waited_for(says: Callable[[int], Any]) -> None:
    async def main() -> None:
        trial = Trial(judge := Scripted(lambda call: says(call) if now() < 100 else 7.0), outage_s=600.0)
        assert await trial.panel.try_out() is None
        assert trial.panel.down and len(trial.panel.outages) == 1 and len(judge.calls) <= 2
        while trial.panel.down:
            await trial.panel.recover()
            (outcome,) = await trial.score(1)
        assert outcome == Score(7.0, values=(7.0,)) and 100 <= now() <= 200

    play(main())


def test_one_that_hangs_is_an_outage_after_one_timeout() -> None:
    async def main() -> None:
        trial = Trial(Judge(seconds=lambda t: HANGS if t < 1 else 0.0), timeout_s=20.0)
        assert await trial.panel.try_out() is None
        assert now() == 20 and trial.panel.outages == ["scorer '0': no score within 20 s"]

    play(main())


def test_a_single_failure_is_forgiven() -> None:
    async def main() -> None:
        trial = Trial(Scripted(lambda call: typo(call) if call == 1 else 2.0))
        assert await trial.panel.try_out() is None
        assert not trial.panel.down and trial.reports == []

    play(main())


def test_each_scorer_of_a_reward_is_tried() -> None:
    async def main() -> None:
        trial = Trial(Scripted(lambda call: 1.0), Scripted(typo))
        wrong = await trial.panel.try_out()
        assert wrong is not None and wrong.startswith("scorer '1': AttributeError")

    play(main())


# ---- drawn samples ---------------------------------------------------------------------------------------------------


def test_after_the_trial_a_drawn_sample_that_fails_is_not_taken_for_an_outage() -> None:
    async def main() -> None:
        trial = Trial(judge := Scripted(lambda call: 1.0 if call == 1 or judge.calls[-1][1] == [0] else typo(call)))
        assert await trial.panel.try_out() is None
        for outcome in await trial.score(3, 4):
            assert isinstance(outcome, Failure) and outcome.wrong and outcome.fault == "retry"
        assert not trial.panel.down
        assert [prompts for _, prompts in judge.calls] == [[0, 1], [3, 4], [3], [3], [0], [4], [4], [0]], (
            "twice, then what it could score"
        )

    play(main())


def test_one_that_was_down_for_the_trial_and_then_fails_drawn_samples_the_same_way_twice_is_wrong() -> None:
    async def main() -> None:
        trial = Trial(Scripted(lambda call: ConnectionRefusedError() if now() < 5 else typo(call)))
        assert await trial.panel.try_out() is None
        await asyncio.sleep(5)
        await trial.panel.recover()
        for outcome in await trial.score(3, 4):
            assert isinstance(outcome, Failure) and outcome.wrong and outcome.fault == "outage"

    play(main())


def test_once_a_drawn_sample_is_scored_the_scorer_is_not_doubted_any_more() -> None:
    async def main() -> None:
        trial = Trial(judge := Judge(bad=(9,)))
        assert await trial.panel.try_out() is None
        await trial.score(1)
        (outcome,) = await trial.score(9)
        assert isinstance(outcome, Failure) and not outcome.wrong
        assert [pixels for _, pixels in judge.calls] == [[0, 0], [1], [9], [1]], (
            "asked once, and then for a drawn sample that it has scored"
        )

    play(main())


# ---- whose fault it is -----------------------------------------------------------------------------------------------


class ConnectTimeout(Exception):
    """An exception named as in an HTTP library."""


class Response:
    def __init__(self, status: int) -> None:
        self.status_code = status


class HTTPStatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"Client error {status}")
        self.response = Response(status)


class Wrapped(Exception):
    """An exception class of a scorer."""


class Prickly(Exception):
    @property
    def response(self) -> None:
        raise RuntimeError("no")


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://judge", status, "no", Message(), io.BytesIO())


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError("the judge is out for lunch"), True),
        (MemoryError(), True),
        (urllib.error.URLError("refused"), True),
        (http_error(503), True),
        (http_error(404), True),
        (http_error(401), False),
        (HTTPStatusError(502), True),
        (HTTPStatusError(422), False),
        (ConnectTimeout(), True),
        (caused(Wrapped("the judge failed"), ConnectionRefusedError()), True),
        (caused(Wrapped("the judge failed"), KeyError("score")), False),
        (Outage("loading"), True),
        (ScoreError("unreadable"), False),
        (AttributeError("x"), False),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (Prickly(), False),
    ],
)
def test_what_counts_as_an_outage(error: BaseException, outage: bool) -> None:
    assert is_outage(error) is outage
