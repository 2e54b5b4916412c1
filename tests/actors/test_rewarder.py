"""Tests the reward worker: batches of the samples that are there, failures that stay their sample's own, and an event
loop that goes on turning."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from actor_world import Desk, make_config, make_job, play, settle

from omni_async.actors.rewarder import Rewarder
from omni_async.aio.clock import ManualClock
from omni_async.config.schema import Scorer as ScorerConfig
from omni_async.rewards.base import Scorer, WrongScorer
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.probe import Probe
from omni_async.simulation import virtual_time
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score, ScoreResult

BLOCKED_AT_MOST_S = 5.0


class Brightness:
    """A scorer of the mean pixel. Prompts steer it: `bad` raises, `wait` waits for `go` in the worker's thread."""

    name = "brightness"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.let_go: list[bool] = []

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.batches.append([prompt.index for prompt in prompts])
        texts = [prompt.text for prompt in prompts]
        if "wait" in texts:
            self.let_go.append(self.go.wait(BLOCKED_AT_MOST_S))
        if "bad" in texts:
            raise ValueError("unreadable")
        if "offline" in texts:
            raise TimeoutError("the judge's server did not answer")
        return [Score(float(image.mean())) for image in images]


class NotANumber:
    """A scorer that returns NaN for images of value 1, which no configuration may let through."""

    name = "not_a_number"

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(float("nan") if image.mean() == 1 else 2.0) for image in images]


def on_stage(scorer: Scorer | WeightedScorer, scene: Callable[[Desk], Awaitable[None]], **changes: float) -> Desk:
    desk = Desk()

    async def main() -> None:
        reward = scorer if isinstance(scorer, WeightedScorer) else WeightedScorer.alone(scorer)
        rewarder = Rewarder("reward-0", make_config(**changes), reward, desk, LocalStore(), ManualClock())
        await rewarder.start()
        run = asyncio.create_task(rewarder.run())
        await scene(desk)
        desk.close()
        await run

    play(main())
    return desk


def values(desk: Desk) -> dict[str, float | str | None]:
    """Returns scores, and errors without the line that raised them."""
    return {name: one.score.value if one.score else without_place(one.error) for name, one in desk.scores.items()}


def without_place(text: str) -> str:
    return re.sub(r" \([^()]+\.py:\d+\)", "", text)


def scored(desk: Desk, count: int) -> Callable[[], bool]:
    return lambda: len(desk.scores) == count


def test_it_scores_a_sample_at_once_and_then_whatever_has_come_meanwhile():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "wait"))
        await settle()
        desk.offer(*(make_job(i) for i in range(1, 7)))
        scorer.go.set()
        await desk.until(scored(desk, 7))

    desk = on_stage(scorer, scene)
    assert scorer.batches == [[0], [1, 2, 3, 4], [5, 6]]  # reward.batch is 4
    assert values(desk) == {f"g0.s{i}": float(i) for i in range(7)}


def test_a_bad_sample_does_not_take_its_neighbours_along():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0), make_job(1, "bad"), make_job(2))
        await desk.until(scored(desk, 3))

    desk = on_stage(scorer, scene)
    assert values(desk) == {"g0.s0": 0.0, "g0.s1": "scorer 'brightness': ValueError: unreadable", "g0.s2": 2.0}
    assert scorer.batches == [[0, 1, 2], [0], [1], [0], [2]]  # after the failure one that it could score


def test_a_bad_sample_alone_is_not_tried_twice():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "bad"))
        await desk.until(scored(desk, 1))

    assert values(on_stage(scorer, scene)) == {"g0.s0": "scorer 'brightness': ValueError: unreadable"}
    assert scorer.batches == [[0]]


def test_a_score_that_takes_too_long_is_an_error_and_the_next_batch_gets_a_thread_that_answers():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "wait"))
        await desk.until(scored(desk, 1))
        desk.offer(make_job(1), make_job(2))
        await desk.until(scored(desk, 3))
        scorer.go.set()

    desk = on_stage(scorer, scene, **{"reward.timeout_s": 0.02})
    assert values(desk) == {"g0.s0": "scorer 'brightness': no score within 0.02 s", "g0.s1": 1.0, "g0.s2": 2.0}


def test_a_scorers_own_timeout_is_told_in_its_own_words():
    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "offline"))
        await desk.until(scored(desk, 1))

    assert values(on_stage(Brightness(), scene)) == {
        "g0.s0": "scorer 'brightness': TimeoutError: the judge's server did not answer"
    }


def test_nan_is_an_error_and_never_a_score():
    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0), make_job(1), make_job(2))
        await desk.until(scored(desk, 3))

    scorer = WeightedScorer([ScorerConfig(name=f"{__name__}:NotANumber", weight=0.5)])
    desk = on_stage(scorer, scene)
    assert desk.scores["g0.s0"].score == Score(1.0, values=(2.0,))
    assert desk.scores["g0.s2"].score == Score(1.0, values=(2.0,))
    assert desk.scores["g0.s1"].score is None
    assert "value is nan" in desk.scores["g0.s1"].error


def test_too_few_scores_are_an_error_for_every_sample():
    class Forgetful:
        name = "forgetful"

        def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
            return []

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0), make_job(1))
        await desk.until(scored(desk, 2))

    desk = on_stage(Forgetful(), scene)
    assert all(result.score is None and result.error for result in desk.scores.values())


def test_the_event_loop_turns_while_a_scorer_computes():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "wait"))
        await settle()
        scorer.go.set()  # from the loop: a scorer that held it would wait in vain
        await desk.until(scored(desk, 1))

    on_stage(scorer, scene)
    assert scorer.let_go == [True]


def test_an_image_that_is_gone_is_its_samples_failure():
    class Leaky(LocalStore):
        async def get(self, reference):
            if reference.image.mean() == 1:
                raise LookupError("object is gone")
            return reference

    desk = Desk()

    async def main() -> None:
        run = asyncio.create_task(
            Rewarder("reward-0", make_config(), WeightedScorer.alone(Brightness()), desk, Leaky(), ManualClock()).run()
        )
        desk.offer(make_job(0), make_job(1), make_job(2))
        await desk.until(scored(desk, 3))
        desk.close()
        await run

    play(main())
    assert values(desk) == {"g0.s0": 0.0, "g0.s1": "LookupError: object is gone", "g0.s2": 2.0}


def test_a_scorer_that_exits_does_not_end_the_worker():
    class Exits(Brightness):
        def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
            if "bad" in [prompt.text for prompt in prompts]:
                raise SystemExit("goodbye")
            return super().score(images, prompts)

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0))
        await desk.until(scored(desk, 1))
        desk.offer(make_job(1, "bad"), make_job(2))
        await desk.until(scored(desk, 3))

    assert values(on_stage(Exits(), scene)) == {
        "g0.s0": 0.0,
        "g0.s1": "scorer 'brightness': SystemExit: goodbye",
        "g0.s2": 2.0,
    }


def test_the_end_of_the_run_does_not_wait_for_a_score():
    scorer = Brightness()

    async def scene(desk: Desk) -> None:
        desk.offer(make_job(0, "wait"))
        await settle()

    began = time.monotonic()
    desk = on_stage(scorer, scene)
    assert time.monotonic() - began < BLOCKED_AT_MOST_S / 2 and not scorer.let_go
    assert desk.scores == {}
    scorer.go.set()


def test_while_a_scorer_is_down_its_samples_go_back_and_no_others_are_asked_for():
    """Runs on virtual time."""
    up_at, desk = 9.0, Desk()

    class Server(Brightness):
        def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
            if 1.0 <= asyncio.get_running_loop().time() < up_at:
                raise ConnectionRefusedError("nobody listens")
            return super().score(images, prompts)

    async def main() -> None:
        rewarder = Rewarder(
            "reward-0", make_config(), WeightedScorer.alone(Server()), desk, LocalStore(), VirtualClock()
        )
        run = asyncio.create_task(rewarder.run())
        desk.offer(make_job(0))
        await asyncio.sleep(1)
        desk.offer(make_job(1), make_job(2))
        await asyncio.sleep(1)
        assert [(r.sample_id, r.fault, r.score) for r in desk.scored_batches[1]] == [
            ("g0.s1", "outage", None),
            ("g0.s2", "outage", None),
        ]
        desk.offer(make_job(3))
        await asyncio.sleep(6.9)
        assert len(desk.scores) == 3 and len(desk.jobs) == 1, "it did not ask"
        await desk.until(scored(desk, 4))
        assert asyncio.get_running_loop().time() == 16.0  # asked after 1, 2, 4 and 8 seconds
        desk.close()
        await run

    virtual_time.run(main())
    assert desk.scores["g0.s3"].score is not None
    assert [without_place(phase) for phase in desk.phases] == [
        "warning: scorer 'brightness' fails (ConnectionRefusedError: nobody listens); its samples wait",
        "scorer 'brightness' answers again after 15 s",
    ]
    assert [(span.start, span.end) for span in desk.spans if span.kind == "outage"] == [(1.0, 16.0)]


# ---- before the first sample -----------------------------------------------------------------------------------------


def tried(scorer: Scorer, desk: Desk, **changes: float) -> Rewarder:
    config = make_config(**changes)
    probe = Probe.of(config, [Prompt(7, "a cat")])
    return Rewarder("reward-0", config, WeightedScorer.alone(scorer), desk, LocalStore(), ManualClock(), probe)


class Misspelt(Brightness):
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(self.tresh) for _ in images]  # type: ignore[attr-defined]


def test_scorers_score_a_synthetic_image_when_the_worker_starts():
    scorer, desk = Brightness(), Desk()

    async def main() -> None:
        await tried(scorer, desk).start()
        assert scorer.batches == [[7, 7]] and desk.wrong == []

    play(main())


def test_a_wrong_scorer_fails_the_start_in_its_own_words():
    desk = Desk()

    async def main() -> None:
        with pytest.raises(
            WrongScorer, match="scorer 'brightness': AttributeError: 'Misspelt' object has no attribute 'tresh'"
        ):
            await tried(Misspelt(), desk).start()

    play(main())
    assert len(desk.wrong) == 1


def test_where_samples_were_scored_before_it_is_waited_for():
    """Checks a scorer that fails after an earlier worker scored samples, say: something that it needs is gone, and may
    come back."""
    desk = Desk()

    async def main() -> None:
        desk.scored_batches.append([ScoreResult("g0.s0", 1, score=Score(1.0))])
        rewarder = tried(Misspelt(), desk)
        await rewarder.start()
        run = asyncio.create_task(rewarder.run())
        desk.offer(make_job(1))
        await settle()
        assert not run.done() and len(desk.jobs) == 1, "it waits, and asks for nothing"
        desk.close()
        await run

    play(main())


def test_without_a_trial_a_scorer_that_never_answered_is_waited_for():
    desk = Desk()

    async def main() -> None:
        await tried(Misspelt(), desk, **{"reward.probe": False}).start()

    play(main())
    assert desk.wrong == []


def test_a_scorer_that_takes_its_time_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni_async.actors.rewarder._START_S", 0.01)
    scorer, desk = Brightness(), Desk()

    async def main() -> None:
        config = make_config()
        probe = Probe.of(config, [Prompt(7, "wait")])
        rewarder = Rewarder("reward-0", config, WeightedScorer.alone(scorer), desk, LocalStore(), ManualClock(), probe)
        await rewarder.start()
        run = asyncio.create_task(rewarder.run())
        desk.offer(make_job(0))
        await settle()
        assert len(desk.jobs) == 1, "no sample before the trial is over"
        scorer.go.set()
        await desk.until(scored(desk, 1))
        desk.close()
        await run

    play(main())
    assert scorer.batches == [[7, 7], [0]]
