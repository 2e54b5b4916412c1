"""Tests a scorer that fails in every way it can, on virtual time: what counts against a sample, what against the
scorer, and when it is asked again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from omni_async.config.schema import Reward
from omni_async.rewards.composition import Member, WeightedScorer
from omni_async.rewards.guard import Failure, ScorerHangs
from omni_async.rewards.guard import Panel
from omni_async.rewards.threads import Threads
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.types import Prompt, Score
from tests.images import as_media

T = TypeVar("T")
HANGS = math.inf


def now() -> float:
    return asyncio.get_running_loop().time()


class Judge:
    """A scorer that scores an image by its first pixel. `up` says whether it works at a time, `seconds` how long its
    next call takes; it fails for `bad` pixels."""

    name = "judge"
    concurrent = False

    def __init__(
        self,
        up: Callable[[float], bool] = lambda t: True,
        seconds: Callable[[float], float] = lambda t: 0.0,
        bad: tuple[int, ...] = (),
    ) -> None:
        self.up, self.seconds, self.bad = up, seconds, bad
        self.calls: list[tuple[float, list[int]]] = []

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        pixels = [int(image[0, 0, 0]) for image in images]
        self.calls.append((now(), pixels))
        if not self.up(now()):
            raise ConnectionRefusedError("nobody listens")
        if set(pixels) & set(self.bad):
            raise ValueError("unreadable")
        return [Score(float(pixel)) for pixel in pixels]


class VirtualThreads(Threads):
    """Threads whose calls begin at once and take the judge's seconds of virtual time."""

    def __init__(self, judge: Judge) -> None:
        super().__init__("virtual")
        self._judge = judge
        self.begun = 0

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        self.begun += 1

        async def work() -> T:
            seconds = self._judge.seconds(now())
            await (asyncio.sleep(seconds) if seconds < HANGS else asyncio.Event().wait())
            return call()

        task = asyncio.create_task(work())
        self._busy[task] = None  # type: ignore[assignment]
        task.add_done_callback(self._busy.pop)
        return task


class Stage:
    """A panel of judges, and the reports about them."""

    def __init__(self, *judges: Judge, **reward: Any) -> None:
        self.reports: list[tuple[float, str]] = []
        self.threads = {f"p/{number}": VirtualThreads(judge) for number, judge in enumerate(judges)}
        weighted = WeightedScorer.alone(judges[0])
        weighted.members = [Member(str(number), 1.0, judge) for number, judge in enumerate(judges)]
        self.panel = Panel("p", weighted, Reward(**reward), VirtualClock(), self.report, self.threads.__getitem__)

    async def report(self, text: str) -> None:
        self.reports.append((now(), text))

    async def score(self, *pixels: int) -> list[float | str | None]:
        """Returns values, reasons, and None for postponed samples."""
        images = [as_media(np.full((2, 2, 3), pixel, np.uint8)) for pixel in pixels]
        outcomes = await self.panel.score(images, [Prompt(pixel, "a cat") for pixel in pixels])
        return [(None if o.fault == "outage" else o.reason) if isinstance(o, Failure) else o.value for o in outcomes]


def play(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(1e5):
            await work

    run(main())


# ---- a scorer that is down -------------------------------------------------------------------------------------------


def test_an_outage_is_held_against_no_sample_and_ends_with_the_first_answer() -> None:
    async def main() -> None:
        judge = Judge(up=lambda t: not 5 <= t < 65)
        stage = Stage(judge)
        assert await stage.score(1, 2) == [1.0, 2.0]
        await asyncio.sleep(5)
        assert await stage.score(3, 4, 5) == [None, None, None]
        assert judge.calls[1:] == [(5, [3, 4, 5]), (5, [3]), (5, [1])], "the last is one that it could score before"
        assert stage.panel.down
        await stage.panel.recover()
        assert [time for time, _ in judge.calls[4:]] == [6, 8, 12, 20, 36, 66]
        assert {tuple(pixels) for _, pixels in judge.calls[4:]} == {(1,)}
        assert not stage.panel.down
        assert await stage.score(3, 4, 5) == [3.0, 4.0, 5.0]
        assert stage.reports == [
            (6, "warning: scorer '0' fails (scorer '0': ConnectionRefusedError: nobody listens); its samples wait"),
            (66, "scorer '0' answers again after 61 s"),
        ]

    play(main())


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_last_sample_alone_does_not_lose_its_tries_to_an_outage(retries: int) -> None:
    async def main() -> None:
        stage = Stage(Judge(up=lambda t: t < 5), retries=retries)
        await stage.score(1)
        await asyncio.sleep(5)
        outcomes = [await stage.score(2) for _ in range(retries + 1)]
        assert outcomes == [[None]] * (retries + 1)

    play(main())


def test_an_outage_that_is_over_after_the_first_pause_is_not_worth_a_word() -> None:
    async def main() -> None:
        stage = Stage(Judge(up=lambda t: not 5 <= t < 5.5))
        await stage.score(1)
        await asyncio.sleep(5)
        assert await stage.score(2) == [None]
        await stage.panel.recover()
        assert await stage.score(2) == [2.0]
        assert now() == 6 and stage.reports == []

    play(main())


def test_a_bad_sample_alone_opens_nothing() -> None:
    async def main() -> None:
        judge = Judge(bad=(7, 8))
        stage = Stage(judge)
        await stage.score(1)
        for _ in range(10):
            assert await stage.score(7) == ["scorer '0': ValueError: unreadable"]
            assert await stage.score(7, 8) == ["scorer '0': ValueError: unreadable"] * 2
        assert not stage.panel.down and stage.reports == []
        assert await stage.score(7, 2, 8) == [
            "scorer '0': ValueError: unreadable",
            2.0,
            "scorer '0': ValueError: unreadable",
        ]

    play(main())


def test_what_the_scorer_is_asked_again_is_kept_when_the_stores_memory_is_used_for_something_else() -> None:
    async def main() -> None:
        stage = Stage(judge := Judge(bad=(7,)))
        image = as_media(np.full((2, 2, 3), 1, np.uint8))
        await stage.panel.score([image], [Prompt(1, "a cat")])
        image.image[:] = 7
        assert await stage.score(7) == ["scorer '0': ValueError: unreadable"]
        assert judge.calls[-1][1] == [1] and not stage.panel.down

    play(main())


def test_the_first_samples_ever_may_be_bad_ones() -> None:
    """Starts with bad samples: only the next sample distinguishes them from an outage."""

    async def main() -> None:
        stage = Stage(Judge(bad=(7, 8, 9)))
        assert await stage.score(7, 8, 9, 1) == [None] * 4
        assert stage.panel.down
        await stage.panel.recover()
        assert now() == 1.0
        bad = "scorer '0': ValueError: unreadable"
        assert await stage.score(7, 8, 9, 1) == [bad, bad, bad, 1.0]
        assert not stage.panel.down

    play(main())


def test_a_scorer_that_is_not_there_yet_is_waited_for() -> None:
    async def main() -> None:
        judge = Judge(up=lambda t: t > 20)
        stage = Stage(judge)
        times = []
        while (outcome := await stage.score(1, 2)) == [None, None]:
            times.append(now())
            await stage.panel.recover()
        assert outcome == [1.0, 2.0]
        assert times == [0, 1, 3, 7, 15] and now() == 31

    play(main())


def test_a_scorer_that_stays_down_is_given_up_with_its_reason_and_still_asked_now_and_then() -> None:
    async def main() -> None:
        judge = Judge(up=lambda t: t < 5 or t >= 1000)
        stage = Stage(judge, outage_s=100.0)
        await stage.score(1)
        await asyncio.sleep(5)
        assert await stage.score(2, 3) == [None, None]
        await stage.panel.recover()
        assert now() == 127, (
            "a pause ends later than the outage's limit, and then a worker beside this one has a second for itself"
        )
        calls = len(judge.calls)
        for _ in range(20):
            await stage.panel.recover()
            first, second = await stage.score(2, 3)
            assert (
                first
                == second
                == f"scorer '0' has been failing for {now() - 5:.0f} s: scorer '0': ConnectionRefusedError: nobody"
                " listens"
            )
            await asyncio.sleep(2)
        assert now() == 187 and len(judge.calls) - calls == 1, "one attempt every 30 s"
        await asyncio.sleep(1000)
        await stage.panel.recover()
        assert await stage.score(2, 3) == [2.0, 3.0]
        assert [text.split(" (")[0] for _, text in stage.reports] == [
            "warning: scorer '0' fails",
            "warning: scorer '0' has been failing for 121 s; its samples fail now",
            "scorer '0' answers again after 1182 s",
        ]

    play(main())


def test_one_of_two_scorers_that_is_down_is_waited_for_alone() -> None:
    async def main() -> None:
        fine, broken = Judge(), Judge(up=lambda t: not 5 <= t < 9)
        stage = Stage(fine, broken)
        assert await stage.score(1) == [2.0]
        await asyncio.sleep(5)
        assert await stage.score(2, 3) == [None, None]
        calls = len(fine.calls)
        await stage.panel.recover()
        assert len(fine.calls) == calls and len(broken.calls) > 5
        assert await stage.score(2, 3) == [4.0, 6.0]

    play(main())


def test_a_sample_that_one_scorer_fails_is_not_shown_to_the_next() -> None:
    async def main() -> None:
        picky, other = Judge(bad=(7,)), Judge()
        stage = Stage(picky, other)
        assert await stage.score(1, 7, 2) == [2.0, "scorer '0': ValueError: unreadable", 4.0]
        assert [pixels for _, pixels in other.calls] == [[1, 2]]

    play(main())


def test_media_that_are_none_are_not_the_scorers_failure() -> None:
    async def main() -> None:
        judge = Judge()
        stage = Stage(judge)
        for _ in range(5):
            (outcome,) = await stage.panel.score([np.zeros((2, 2), np.uint8)], [Prompt(0, "a cat")])
            assert (
                isinstance(outcome, Failure)
                and "expected media, got a ndarray" in outcome.reason
                and outcome.fault == "retry"
            )
        assert judge.calls == [] and not stage.panel.down

    play(main())


# ---- a scorer that is slow -------------------------------------------------------------------------------------------


def slow(*seconds: float) -> Judge:
    """Makes a judge whose calls take these seconds, in the order they begin, and then none."""
    left = list(seconds)
    return Judge(seconds=lambda t: left.pop(0) if left else 0.0)


def concurrent(judge: Judge) -> Judge:
    judge.concurrent = True
    return judge


def test_a_slow_call_is_made_twice_and_the_first_answer_counts() -> None:
    async def main() -> None:
        judge = concurrent(slow(50, 1))
        stage = Stage(judge, hedge_s=10.0)
        assert await stage.score(1, 2) == [1.0, 2.0]
        assert now() == 11 and stage.threads["p/0"].begun == 2
        assert stage.threads["p/0"].busy == 1, "the slow one is left behind"
        assert await stage.score(3) == [3.0], "and does not hold up the next"
        assert now() == 11
        await asyncio.sleep(100)
        assert stage.threads["p/0"].busy == 0

    play(main())


def test_the_second_call_may_be_the_slower_one() -> None:
    async def main() -> None:
        stage = Stage(concurrent(slow(12, 50)), hedge_s=10.0)
        assert await stage.score(1) == [1.0]
        assert now() == 12 and stage.threads["p/0"].begun == 2

    play(main())


def test_a_call_that_fails_while_the_other_runs_decides_nothing() -> None:
    async def main() -> None:
        judge = concurrent(Judge(up=lambda t: t > 13))
        left = [12.0, 5.0]
        judge.seconds = lambda t: left.pop(0) if left else 0.0
        stage = Stage(judge, hedge_s=10.0)
        assert await stage.score(1) == [1.0]
        assert now() == 15

    play(main())


def test_there_is_one_second_call_and_the_timeout_is_for_both() -> None:
    async def main() -> None:
        stage = Stage(concurrent(slow(0, HANGS, HANGS)), hedge_s=10.0, timeout_s=25.0)
        assert await stage.score(1) == [1.0]
        assert await stage.score(2) == ["scorer '0': no score within 25 s"]
        assert now() == 25 and stage.threads["p/0"].busy == 2

    play(main())


def test_a_call_that_fails_at_once_is_not_repeated() -> None:
    async def main() -> None:
        stage = Stage(concurrent(judge := Judge(bad=(7,))), hedge_s=10.0)
        assert await stage.score(1) == [1.0]
        assert await stage.score(7) == ["scorer '0': ValueError: unreadable"]
        assert [pixels for _, pixels in judge.calls] == [[1], [7], [1]]

    play(main())


def test_a_scorer_that_does_not_say_it_is_concurrent_is_not_called_twice() -> None:
    async def main() -> None:
        stage = Stage(slow(50), hedge_s=10.0)
        assert await stage.score(1) == [1.0]
        assert now() == 50 and stage.threads["p/0"].begun == 1

    play(main())


def test_a_batch_that_is_too_slow_is_scored_one_by_one() -> None:
    async def main() -> None:
        stage = Stage(slow(90, 20, 20), timeout_s=60.0)
        assert await stage.score(1, 2) == [1.0, 2.0]
        assert now() == 100

    play(main())


# ---- a scorer that hangs ---------------------------------------------------------------------------------------------


def test_samples_that_hang_for_ever_end_the_worker_before_it_is_full_of_threads() -> None:
    async def main() -> None:
        judge = Judge(seconds=lambda t: HANGS if t % 20 < 10 else 0.0)
        stage = Stage(judge, timeout_s=10.0)
        await asyncio.sleep(10)
        assert await stage.score(2) == [2.0]
        await asyncio.sleep(10)
        with pytest.raises(ScorerHangs, match="8 calls have not returned; give its calls a timeout of their own"):
            for _ in range(100):
                assert await stage.score(1) == ["scorer '0': no score within 10 s"]
                assert await stage.score(2) == [2.0]
                await asyncio.sleep(10)
        assert stage.threads["p/0"].busy == 8 and not stage.panel.down

    play(main())


def test_slow_calls_that_were_given_up_are_waited_for_before_there_are_too_many() -> None:
    async def main() -> None:
        seconds = iter([0.0] + [50.0, 0.0] * 20)  # every other call is slow, and its second is not
        stage = Stage(concurrent(Judge(seconds=lambda t: next(seconds))), hedge_s=1.0)
        for pixel in range(1, 21):
            assert await stage.score(pixel) == [float(pixel)]
            assert stage.threads["p/0"].busy <= 9
        assert 50 < now() < 150, "twice for eight of them"

    play(main())


def test_a_server_that_hangs_for_a_while_is_asked_no_more_than_there_are_threads() -> None:
    async def main() -> None:
        judge = Judge(seconds=lambda t: max(0.0, 300 - t) if t >= 5 else 0.0)
        stage = Stage(judge, timeout_s=10.0)
        await stage.score(1)
        await asyncio.sleep(5)
        assert await stage.score(2, 3, 4) == [None] * 3
        await stage.panel.recover()
        assert 300 <= now() <= 340
        assert await stage.score(2, 3, 4) == [2.0, 3.0, 4.0]
        assert stage.threads["p/0"].begun <= 1 + 8 + 2

    play(main())


def test_a_server_that_hangs_for_ever_ends_the_worker_when_the_outage_is_over() -> None:
    async def main() -> None:
        judge = Judge(seconds=lambda t: HANGS if t >= 5 else 0.0)
        stage = Stage(judge, timeout_s=10.0, outage_s=200.0)
        await stage.score(1)
        await asyncio.sleep(5)
        assert await stage.score(2, 3, 4) == [None] * 3
        with pytest.raises(ScorerHangs, match=r"8 calls have not returned.*reward.outage_s = 200 is over"):
            await stage.panel.recover()
        assert 200 <= now() <= 300

    play(main())
