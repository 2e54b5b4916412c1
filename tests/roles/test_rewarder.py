"""Tests the reward worker: its batches, failures of single samples, and its start. tests/rewards has the ways that
scorers fail, tests/faults outages."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
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


def make_rewarder(scorer: Scorer | LoadedReward, desk: Desk, store: Any = None, probe: Any = None) -> Rewarder:
    config = make_config()
    reward = scorer if isinstance(scorer, LoadedReward) else LoadedReward.of(config.reward, scorer)
    return Rewarder("reward-0", config, reward, desk, store or LocalStore(), ManualClock(), probe)


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


async def scored(desk: Desk, count: int) -> None:
    await desk.until(lambda: len(desk.scores) == count)


def values(desk: Desk) -> dict[str, float | str | None]:
    """Returns scores, or errors without the lines that raised them."""
    without_place = re.compile(r" \([^()]+\.py:\d+\)")
    return {k: one.score.value if one.score else without_place.sub("", one.error) for k, one in desk.scores.items()}


async def test_batches_are_what_came_meanwhile():
    scorer = Brightness()
    async with on_stage(scorer) as desk:
        desk.offer(make_job(0, "wait"))
        await settle()
        desk.offer(*(make_job(i) for i in range(1, 7)))
        scorer.go.set()  # from the loop: a scorer that held it would wait in vain
        await scored(desk, 7)
    assert scorer.let_go == [True]
    assert scorer.batches == [[0], [1, 2, 3, 4], [5, 6]]  # reward.batch is 4
    assert values(desk) == {f"g0.s{i}": float(i) for i in range(7)}


async def test_known_answers_are_counted():
    scorer = Brightness()
    formula = LoadedReward.of(make_config().reward, scorer).formula
    async with on_stage(LoadedReward(formula, [LoadedScorer(scorer, identity=b"deterministic")])) as desk:
        desk.offer(make_job(0), make_job(1))
        await scored(desk, 2)
        desk.offer(*(msgspec.structs.replace(make_job(i), sample_id=f"again{i}") for i in range(3)))
        await scored(desk, 5)
    assert sorted(index for batch in scorer.batches for index in batch) == [0, 1, 2]
    assert [desk.scores[f"again{i}"].cached for i in range(3)] == [1, 1, 0]
    assert [values(desk)[f"again{i}"] for i in range(3)] == [0.0, 1.0, 2.0]


async def test_bad_samples_fail_alone():
    class Leaky(LocalStore):
        async def get(self, reference):
            if reference.image.mean() == 3:
                raise LookupError("object is gone")
            return reference

    scorer, said = Brightness(), "scorer 'brightness': ValueError: unreadable"
    async with on_stage(scorer, store=Leaky()) as desk:
        desk.offer(*(make_job(i, text) for i, text in enumerate(["a cat", "bad", "a cat", "a cat"])))
        await scored(desk, 4)
        assert scorer.batches == [[0, 1, 2], [0], [1], [0], [2]]  # after the failure a sample that it could score
    assert values(desk) == {"g0.s0": 0.0, "g0.s1": said, "g0.s2": 2.0, "g0.s3": "LookupError: object is gone"}


class Misspelt(Brightness):
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(self.tresh) for _ in images]


def probe(text: str = "a cat", **changes: Any) -> Probe | None:
    return Probe.of(make_config(**changes), [Prompt(7, text)])


async def test_wrong_scorers_fail_the_start():
    scorer, desk = Brightness(), Desk()
    await make_rewarder(scorer, desk, probe=probe()).start()
    await make_rewarder(Misspelt(), desk, probe=probe(**{"reward.probe": False})).start()
    assert scorer.batches == [[7, 7]] and desk.wrong == []
    said = "scorer 'brightness': AttributeError: 'Misspelt' object has no attribute 'tresh'"
    with pytest.raises(WrongScorer, match=said):
        await make_rewarder(Misspelt(), desk, probe=probe()).start()
    assert len(desk.wrong) == 1
    desk.scored_batches.append([ScoreResult("g0.s0", 1, score=Score(1.0))])  # by an earlier worker
    async with on_stage(Misspelt(), desk=desk, probe=probe()):
        desk.offer(make_job(1))
        await settle()
        assert len(desk.jobs) == 1, "it waits for the scorer"


async def test_slow_scorers_hold_up_neither_start_nor_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omni_async.roles.rewarder._START_S", 0.01)
    scorer = Brightness()
    async with on_stage(scorer, probe=probe("wait")) as desk:
        desk.offer(make_job(0))
        await settle()
        assert len(desk.jobs) == 1, "no sample before the trial is over"
        scorer.go.set()
        await scored(desk, 1)
        scorer.go.clear()
        desk.offer(make_job(1, "wait"))
        await until(lambda: scorer.batches == [[7, 7], [0], [1]], "the scorer is called")
    assert len(scorer.let_go) == 2, "its thread still waits"
    assert len(desk.scores) == 1
    scorer.go.set()
