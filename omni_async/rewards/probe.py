"""Makes the sample that a scorer is tried with before a sample is drawn: synthetic images of the run's size, with
prompts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_async.config import Config
from omni_async.rewards.checks import describe
from omni_async.types import Prompt

# Enough to detect a scorer that answers for a batch as if it were one image.
_IMAGES = 2


@dataclass(frozen=True)
class Probe:
    """Synthetic images and their prompts. `images`: uint8 (height, width, 3), as many as `prompts`."""

    images: list[NDArray[np.uint8]]
    prompts: list[Prompt]

    @classmethod
    def of(cls, config: Config, prompts: Sequence[Prompt]) -> Probe | None:
        """Makes the probe; None if the recipe wants none, or has no prompts."""
        if not config.reward.probe or not prompts:
            return None
        count = min(_IMAGES, config.reward.batch)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        (media,) = config.rollout.sampling.media()
        image = _gradient(*media.shape[1:])
        return cls([np.ascontiguousarray(image[:: 1 - 2 * i]) for i in range(count)], chosen)

    def failed(self, reason: str) -> str:
        """Returns the sentence about a scorer that fails the probe, with the scorer's own error."""
        tried = describe(0, self.prompts[0]).partition("(")[2].removesuffix(")")
        return (
            f"{reason} (the same twice, for a synthetic image of {tried}; a scorer that needs drawn images wants"
            " reward.probe=false)"
        )


def _gradient(height: int, width: int) -> NDArray[np.uint8]:
    """Returns an image where red grows to the right, green downwards, and blue falls: no two rows are alike."""
    down, right = np.linspace(0, 255, height)[:, None], np.linspace(0, 255, width)[None, :]
    planes = np.broadcast_arrays(right, down, 255 - (down + right) / 2)
    return np.stack(planes, axis=-1).astype(np.uint8)
