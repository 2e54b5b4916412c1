"""Runs the coordinator with real reward workers around it: engines, trainer and publisher are those of the control
plane's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from omni_async.actors.rewarder import Rewarder
from omni_async.aio.clock import Clock
from omni_async.config import Config, with_spec
from omni_async.media import Media
from omni_async.rewards.base import Scorer
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.probe import Probe
from omni_async.store import LocalStore
from omni_async.types import Prompt
from tests.control.control_world import Run
from tests.images import as_media


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
    """A run with real reward workers. `scorers()` are a reward worker's, built for each by itself; `tried`: they score
    a synthetic sample first."""

    def __init__(
        self, config: Config, scorers: Callable[[], Scorer], clock: Clock, tried: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(config, **kwargs)
        self._tried = tried
        self._scorers = scorers
        self._clock = clock

    async def rewarder(self, worker: str) -> None:
        reward = WeightedScorer.alone(self._scorers())
        probe = Probe.of(with_spec(self.config), [Prompt(0, "a synthetic cat")]) if self._tried else None
        rewarder = Rewarder(worker, self.config, reward, self.coordinator, Images(), self._clock, probe)
        await rewarder.start()
        await rewarder.run()

    @property
    def logged(self) -> list[str]:
        return [data["text"] for data in self.of_kind("phase")]
