"""Scores what an emulated engine made.

A score is made of the seed that the engine wrote on the media, in no time. How long a batch keeps a reward worker busy
is the worker's own matter.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from omni_async.performance.emulation import seed_of
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


class ReplayScorer:
    """A `Scorer` whose rewards are uniform in [0, 1) and a function of the sample's seed alone."""

    name = "replay"
    accepts = ("image", "video", "audio")

    def score(self, media: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        """Score media by their seeds. ValueError for media too short to carry a seed."""
        return [Score(_reward(seed_of(one))) for one in media]


def _reward(seed: int) -> float:
    drawn = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "little") / 2**64
