"""Tests scorers that fail under a whole control plane with real reward workers, in virtual time: every group ends
trained or rejected with its reason, and the run ends."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.config import Config, with_spec
from omni_async.media import Media
from omni_async.rewards.base import Scorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.probe import Probe
from omni_async.roles.rewarder import Rewarder
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.store import LocalStore
from omni_async.types import Prompt, Score
from tests.control.control_world import Run, make_config
from tests.support.images import as_media


def with_reward(config: Config, **reward: Any) -> Config:
    return replace(config, reward=replace(config.reward, **reward))


def job(updates: int = 6, **reward: Any) -> Config:
    """Configures updates of two groups, S = 1, and scorers that are asked again after a second."""
    return with_reward(make_config(S=1, P=2, updates=updates), **{"backoff_s": 1.0, "retries": 1, **reward})


def sample_of(image: np.ndarray) -> tuple[int, int]:
    """Returns the group and the number of the sample that an image is of."""
    high, low, sample = (int(value) for value in image[0, 0])
    return 256 * high + low, sample


class Images(LocalStore):
    """A store that draws the image of `media g3.s1` when it is asked for."""

    async def get(self, reference: str) -> Media:
        group, _, sample = reference.removeprefix("media g").partition(".s")
        return as_media(np.full((2, 2, 3), (*divmod(int(group), 256), int(sample)), np.uint8))


class ScoredRun(Run):
    """A run with real reward workers, whose other roles take tenths of a second for what they do.

    `tried`: workers score a synthetic sample first."""

    def __init__(self, config: Config, judge: Scorer, tried: bool = False, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._tried, self._judge = tried, judge

    async def turns(self, kind: str) -> None:
        await asyncio.sleep(0.1 * self._random.randint(0, self._pause[kind]))

    async def rewarder(self, worker: str) -> None:
        reward = LoadedReward.of(self.config.reward, self._judge)
        probe = Probe.of(with_spec(self.config), [Prompt(0, "a synthetic cat")]) if self._tried else None
        rewarder = Rewarder(worker, self.config, reward, self.coordinator, Images(), VirtualClock(), probe)
        await rewarder.start()
        await rewarder.run()

    @property
    def ended(self) -> dict[str, set[int]]:
        """Returns the groups by how they ended, and requires that each ended once."""
        assert len({entry.group for entry in self.entries}) == len(self.entries)
        groups: dict[str, set[int]] = {"trained": set(), "rejected": set(), "dropped": set()}
        for entry in self.entries:
            groups[entry.event].add(entry.group)
            assert (entry.reason is None) == (entry.event == "trained")
        return groups

    @property
    def reasons(self) -> list[str]:
        return [entry.reason or "" for entry in self.entries if entry.event == "rejected"]


class Judge:
    """A scorer whose reward is the sample's number, or `drawn`'s; a batch with NaN in it is all NaN. It is down unless
    `up`. It distinguishes drawn images, of size 2, from the synthetic one, which is larger."""

    name = "judge"

    def __init__(
        self,
        drawn: Callable[[int, int], float] = lambda group, sample: float(sample),
        synthetic: Callable[[], float] = lambda: 0.0,
        up: Callable[[float], bool] = lambda now: True,
    ) -> None:
        self._drawn, self._synthetic, self._up = drawn, synthetic, up

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        if not self._up(asyncio.get_running_loop().time()):
            raise ConnectionRefusedError("nobody listens")
        if images[0].shape != (2, 2, 3):
            return [Score(self._synthetic()) for _ in images]
        values = [self._drawn(*sample_of(image)) for image in images]
        return [Score(math.nan if any(map(math.isnan, values)) else value) for value in values]


MISSPELT = "'Judge' object has no attribute '_tresh'"


def misspelt(*_: int) -> float:
    raise AttributeError(MISSPELT)


def play(config: Config, judge: Judge, stop_s: float = math.inf, **kwargs: Any) -> tuple[ScoredRun, float]:
    """Plays a run to its end, or stops it. Returns it with the virtual seconds that it took."""

    async def main() -> tuple[ScoredRun, float]:
        played = ScoredRun(config, judge, **kwargs)
        publisher, loop = asyncio.create_task(played.publisher()), asyncio.get_running_loop()
        roles: list[Coroutine[Any, Any, None]] = [played.driver(), played.trainer()]
        roles += [played.producer(engine) for engine in played.holds]
        roles += [played.rewarder(f"reward-{i}") for i in range(played._reward_workers)]
        if stop_s < math.inf:
            loop.call_later(stop_s, lambda: loop.create_task(played.coordinator.stop("enough")))
        try:
            async with asyncio.timeout(1e5):
                await asyncio.gather(*roles)
        finally:
            publisher.cancel()
        return played, loop.time()

    return run(main())


def test_a_scorer_that_never_comes_back():
    played, seconds = play(job(400, outage_s=60.0), Judge(up=lambda now: now < 10))
    status, reason = played.outcome
    assert status == "failed" and reason is not None
    assert "groups in a row ended without being trained" in reason
    assert "scorer 'judge' has been failing for" in reason and "ConnectionRefusedError: nobody listens" in reason
    assert len(played.ended["rejected"]) >= 32
    assert all("ConnectionRefusedError" in why for why in played.reasons)
    assert 70 <= seconds < 1000


def test_a_run_stopped_in_an_outage():
    played, seconds = play(job(400, outage_s=1e6), Judge(up=lambda now: now < 0), stop_s=1000)
    assert seconds <= 1001
    assert played.outcome == ("interrupted", "enough") and not played.ended["rejected"]


WORDS = f"nothing could be scored so far, and the error stays the same: scorer 'judge': AttributeError: {MISSPELT}"


@pytest.mark.parametrize(("drawn", "words"), [(misspelt, WORDS), (lambda *_: 1e30, "beyond reward.max_abs")])
def test_a_wrong_scorer_ends_the_run_within_seconds(drawn, words):
    played, seconds = play(job(400, retries=3), Judge(drawn), tried=True)
    status, reason = played.outcome
    assert status == "failed" and reason is not None and words in reason
    assert drawn is not misspelt or (reason.startswith(words) and __file__ in reason), "with the line that is wrong"
    assert seconds < 10, "not the 600 s of an outage"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_outages_cost_no_group_and_bad_samples_only_theirs(seed):
    """Varies the arrangement, once the scorer has answered each worker. Some try their scorer before the first
    sample."""
    dice = random.Random(seed)
    bad = {group for group in range(1, 40) if dice.random() < 0.2}
    down, t = [], dice.uniform(2, 20)
    for _ in range(dice.randint(0, 3)):
        down.append((t, t := t + dice.uniform(1, 300)))
        t += dice.uniform(1, 100)
    judge = Judge(
        lambda group, sample: math.nan if group in bad and sample == 1 else float(sample),
        up=lambda now: not any(a <= now < b for a, b in down),
    )
    config = make_config(
        S=dice.randint(0, 2),
        P=dice.randint(1, 3),
        group_size=dice.randint(2, 4),
        updates=dice.randint(2, 6),
        engines=dice.randint(1, 2),
        score_retries=3,
        backoff_s=dice.choice([0.5, 1.0, 4.0]),
        score_at_once=dice.random() < 0.7,
    )
    config = with_reward(config, batch=dice.choice([1, 2, 8]), outage_s=1000.0)
    played, _ = play(config, judge, reward_workers=dice.choice([1, 2, 3, 12]), seed=seed, tried=dice.random() < 0.5)
    assert played.outcome == ("done", None)
    assert played.ended["rejected"] <= bad and not played.ended["trained"] & bad
    for reason in played.reasons:
        assert "reward failed 4 times: scorer 'judge', sample 0" in reason and "value is nan" in reason
