"""What a scorer is tried with before a sample is drawn: synthetic pictures of the run's size, with prompts of the
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_async.config import Config
from omni_async.rewards.checks import describe
from omni_async.types import Prompt

# As many as tell a scorer that answers for a batch as if it were one picture.
_PICTURES = 2


@dataclass(frozen=True)
class Probe:
    """`images`: uint8 (height, width, 3), as many as `prompts`."""

    images: list[NDArray[np.uint8]]
    prompts: list[Prompt]

    @classmethod
    def of(cls, config: Config, prompts: Sequence[Prompt]) -> Probe | None:
        """None if the recipe wants none, or has nothing to try a scorer with."""
        if not config.reward.probe or not prompts:
            return None
        count = min(_PICTURES, config.reward.batch)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        (media,) = config.rollout.sampling.media()
        picture = _gradient(*media.shape[1:])
        return cls([np.ascontiguousarray(picture[:: 1 - 2 * i]) for i in range(count)], chosen)

    def failed(self, reason: str) -> str:
        """The sentence about a scorer that fails it, in the scorer's own words."""
        tried = describe(0, self.prompts[0]).partition("(")[2].removesuffix(")")
        return (
            f"{reason} (the same twice, for a synthetic picture of {tried}; a scorer that needs drawn pictures wants"
            " reward.probe=false)"
        )


def _gradient(height: int, width: int) -> NDArray[np.uint8]:
    """Red grows to the right, green downwards, blue falls: no two rows are alike."""
    down, right = np.linspace(0, 255, height)[:, None], np.linspace(0, 255, width)[None, :]
    planes = np.broadcast_arrays(right, down, 255 - (down + right) / 2)
    return np.stack(planes, axis=-1).astype(np.uint8)
