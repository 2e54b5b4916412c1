"""Replays a profile as a scorer: makes a reward of the seed that a replaying engine wrote on its media.

The profile says how long a batch keeps a reward worker busy; `seconds` draws that time, and the owner of the device
waits for it.
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
    """A `Scorer` that replays a profile.

    Rewards are uniform in [0, 1) and a function of the sample's seed alone; `seed` decides how long batches take.
    """

    name = "replay"
    accepts = ("image", "video", "audio")

    def __init__(self, service: ServiceTime, seed: str) -> None:
        self._service = service
        self._random = random.Random(seed)

    def seconds(self, samples: int) -> float:
        """Draw the time of the next batch of `samples`."""
        return self._service.sample(self._random, samples)

    def score(self, media: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        """Score media by their seeds. ValueError for media too short to carry a seed."""
        return [Score(_reward(seed_of(one))) for one in media]


def _reward(seed: int) -> float:
    drawn = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") / 2**64
