"""Tests the reward worker: batches of the samples that are there, failures that stay their sample's own, and an event
loop that goes on turning. In how many ways a scorer may fail is tested in tests/rewards."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_async.aio.clock import ManualClock
from omni_async.rewards.base import Scorer, WrongScorer
from omni_async.rewards.loaded import LoadedReward, LoadedScorer
from omni_async.rewards.probe import Probe
from omni_async.roles.rewarder import Rewarder
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score, ScoreResult
from tests.roles.actor_world import Desk, make_config, make_job, settle
from tests.support.patience import PATIENCE, until


class Brightness:
    """A scorer of the mean pixel. Prompts steer it: `bad` raises, `wait` waits for `go` in the worker's thread."""

    name = "brightness"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.let_go: list[bool] = []

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        self.batches.append([prompt.index for prompt in prompts])
        for prompt in prompts:
            if prompt.text == "wait":
                self.let_go.append(self.go.wait(PATIENCE))
            if prompt.text == "bad":
                raise ValueError("unreadable")
        return [Score(float(image.mean())) for image in images]


def make_rewarder(
    scorer: Scorer | LoadedReward, desk: Desk, store: Any = None, clock: Any = None, probe: Any = None, **changes: Any
) -> Rewarder:
    config, store, clock = make_config(**changes), store or LocalStore(), clock or ManualClock()
    reward = scorer if isinstance(scorer, LoadedReward) else LoadedReward.of(config.reward, scorer)
    return Rewarder("reward-0", config, reward, desk, store, clock, probe)


@asynccontextmanager
async def on_stage(scorer: Any, desk: Desk | None = None, **kwargs: Any) -> AsyncIterator[Desk]:
    desk = desk or Desk()
    rewarder = make_rewarder(scorer, desk, **kwargs)
    await rewarder.start()
    run = asyncio.create_task(rewarder.run())
    yield desk
    assert not run.done()
    desk.close()
    await run


async def scored(scorer: Any, *texts: str, **kwargs: Any) -> Desk:
    """Returns the desk once samples of these prompts have been scored."""
    async with on_stage(scorer, **kwargs) as desk:
        desk.offer(*(make_job(i, text) for i, text in enumerate(texts)))
        await desk.until(of(desk, len(texts)))
    return desk


def without_place(text: str) -> str:
    """Removes the line that raised an error."""
    return re.sub(r" \([^()]+\.py:\d+\)", "", text)


def values(desk: Desk) -> dict[str, float | str | None]:
    return {name: one.score.value if one.score else without_place(one.error) for name, one in desk.scores.items()}


def of(desk: Desk, count: int) -> Callable[[], bool]:
    return lambda: len(desk.scores) == count


async def test_it_scores_a_sample_at_once_and_then_whatever_has_come_meanwhile_while_the_event_loop_turns():
    scorer = Brightness()
    async with on_stage(scorer) as desk:
        desk.offer(make_job(0, "wait"))
        await settle()
        desk.offer(*(make_job(i) for i in range(1, 7)))
        scorer.go.set()  # from the loop: a scorer that held it would wait in vain
        await desk.until(of(desk, 7))
    assert scorer.let_go == [True]
    assert scorer.batches == [[0], [1, 2, 3, 4], [5, 6]]  # reward.batch is 4
    assert values(desk) == {f"g0.s{i}": float(i) for i in range(7)}


async def test_an_answer_that_is_known_is_not_asked_for_and_is_counted():
    scorer = Brightness()
    formula = LoadedReward.of(make_config().reward, scorer).formula
    async with on_stage(LoadedReward(formula, [LoadedScorer(scorer, identity=b"deterministic")])) as desk:
        desk.offer(make_job(0), make_job(1))
        await desk.until(of(desk, 2))
        again = [make_job(0), make_job(1), make_job(2)]
        desk.offer(*(msgspec.structs.replace(job, sample_id=f"again{i}") for i, job in enumerate(again)))
        await desk.until(of(desk, 5))
    assert sorted(index for batch in scorer.batches for index in batch) == [0, 1, 2]
    assert [desk.scores[f"again{i}"].cached for i in range(3)] == [1, 1, 0]
    assert values(desk) == {"g0.s0": 0.0, "g0.s1": 1.0, "again0": 0.0, "again1": 1.0, "again2": 2.0}


async def test_a_bad_sample_does_not_take_its_neighbours_along_and_is_alone_not_tried_twice():
    scorer, said = Brightness(), "scorer 'brightness': ValueError: unreadable"
    assert values(await scored(scorer, "bad")) == {"g0.s0": said}
    assert scorer.batches == [[0]]
    scorer = Brightness()
    assert values(await scored(scorer, "a cat", "bad", "a cat")) == {"g0.s0": 0.0, "g0.s1": said, "g0.s2": 2.0}
    assert scorer.batches == [[0, 1, 2], [0], [1], [0], [2]]  # after the failure one that it could score


async def test_an_image_that_is_gone_is_its_samples_failure():
    class Leaky(LocalStore):
        async def get(self, reference):
            if reference.image.mean() == 1:
                raise LookupError("object is gone")
            return reference

    desk = await scored(Brightness(), *["a cat"] * 3, store=Leaky())
    assert values(desk) == {"g0.s0": 0.0, "g0.s1": "LookupError: object is gone", "g0.s2": 2.0}


async def test_the_end_of_the_run_does_not_wait_for_a_score():
    scorer = Brightness()
    async with on_stage(scorer) as desk:
        desk.offer(make_job(0, "wait"))
        await until(lambda: scorer.batches == [[0]], "the scorer is asked")
    assert not scorer.let_go, "its thread still waits"
    assert desk.scores == {}
    scorer.go.set()


@pytest.mark.virtual_time
async def test_while_a_scorer_is_down_its_samples_go_back_and_no_others_are_asked_for():
    class Server(Brightness):
        def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
            if began + 1.0 <= asyncio.get_running_loop().time() < began + 9.0:
                raise ConnectionRefusedError("nobody listens")
            return super().score(images, prompts)

    began = asyncio.get_running_loop().time()
    async with on_stage(Server(), clock=VirtualClock()) as desk:
        desk.offer(make_job(0))
        await asyncio.sleep(1)
        desk.offer(make_job(1), make_job(2))
        await asyncio.sleep(1)
        went_back = [(r.sample_id, r.fault, r.score) for r in desk.scored_batches[1]]
        assert went_back == [("g0.s1", "outage", None), ("g0.s2", "outage", None)]
        desk.offer(make_job(3))
        await asyncio.sleep(6.9)
        assert len(desk.scores) == 3 and len(desk.jobs) == 1, "it did not ask"
        await desk.until(of(desk, 4))
        assert asyncio.get_running_loop().time() - began == 16.0  # asked after 1, 2, 4 and 8 seconds
    assert desk.scores["g0.s3"].score is not None
    why = "ConnectionRefusedError: nobody listens"
    assert [without_place(phase) for phase in desk.phases] == [
        f"warning: scorer 'brightness' fails ({why}); its samples wait",
        "scorer 'brightness' answers again after 15 s",
    ]
    assert [(span.start - began, span.end - began) for span in desk.spans if span.kind == "outage"] == [(1.0, 16.0)]


class Misspelt(Brightness):
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(self.tresh) for _ in images]  # type: ignore[attr-defined]


def probe(text: str = "a cat", **changes: Any) -> Probe | None:
    return Probe.of(make_config(**changes), [Prompt(7, text)])


async def test_scorers_score_a_synthetic_image_at_the_start_and_a_wrong_one_fails_it_unless_there_is_no_trial():
    scorer, desk = Brightness(), Desk()
    await make_rewarder(scorer, desk, probe=probe()).start()
    await make_rewarder(Misspelt(), desk, probe=probe(**{"reward.probe": False})).start()
    assert scorer.batches == [[7, 7]] and desk.wrong == []
    said = "scorer 'brightness': AttributeError: 'Misspelt' object has no attribute 'tresh'"
    with pytest.raises(WrongScorer, match=said):
        await make_rewarder(Misspelt(), desk, probe=probe()).start()
    assert len(desk.wrong) == 1


async def test_where_samples_were_scored_before_it_is_waited_for():
    """Checks a scorer that fails after an earlier worker scored samples, say: something that it needs is gone, and may
    come back."""
    desk = Desk()
    desk.scored_batches.append([ScoreResult("g0.s0", 1, score=Score(1.0))])
    async with on_stage(Misspelt(), desk=desk, probe=probe()):
        desk.offer(make_job(1))
        await settle()
        assert len(desk.jobs) == 1, "it waits, and asks for nothing"


async def test_a_scorer_that_takes_its_time_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni_async.roles.rewarder._START_S", 0.01)
    scorer = Brightness()
    async with on_stage(scorer, probe=probe("wait")) as desk:
        desk.offer(make_job(0))
        await settle()
        assert len(desk.jobs) == 1, "no sample before the trial is over"
        scorer.go.set()
        await desk.until(of(desk, 1))
    assert scorer.batches == [[7, 7], [0]]
