"""A scorer that replays a profile: it reads the seed that a replaying engine wrote on its media and makes a reward of
it, in no time.

How long a batch keeps a reward worker busy is the profile's; `seconds` says it, and whoever has the device waits for
it.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from omni_async.performance.media import seed_of
from omni_async.performance.service import ServiceTime
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


class ReplayScorer:
    """See `Scorer`. Rewards are uniform in [0, 1) and a function of the sample's seed alone; `seed` decides how long
    batches take."""

    name = "replay"

    def __init__(self, service: ServiceTime, seed: str) -> None:
        self._service = service
        self._random = random.Random(seed)

    def seconds(self, samples: int) -> float:
        """Of the next batch of `samples`."""
        return self._service.sample(self._random, samples)

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        """ValueError for media too short to carry a seed."""
        return [Score(_reward(seed_of(image))) for image in images]


def _reward(seed: int) -> float:
    drawn = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") / 2**64
