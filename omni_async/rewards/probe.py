"""Makes the sample that a scorer is tried with before any is generated: synthetic media, with prompts of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.config import Config
from omni_async.media import Media
from omni_async.plugins.families import MediaShape
from omni_async.rewards.base import describe
from omni_async.types import Prompt

# Enough to detect a scorer that answers for a batch as if it were one sample.
_SAMPLES = 2
_SENTENCES = ("The answer is 42.", "It cannot be read.")


@dataclass(frozen=True)
class Probe:
    """Synthetic media and their prompts, equally many of both."""

    media: list[Media]
    prompts: list[Prompt]

    @classmethod
    def of(cls, config: Config, prompts: Sequence[Prompt]) -> Probe | None:
        """Make the probe; None if the recipe disables it or has no prompts."""
        if not config.reward.probe or not prompts:
            return None
        count = min(_SAMPLES, config.reward.batch)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        shapes = config.rollout.sampling.media()
        return cls([_synthetic(shapes, flipped=bool(i)) for i in range(count)], chosen)

    def failed(self, reason: str) -> str:
        """Return the sentence about a scorer that fails the probe, with the scorer's own error."""
        tried = describe(0, self.prompts[0]).partition("(")[2].removesuffix(")")
        hint = "a scorer that needs drawn ones wants reward.probe=false"
        return f"{reason} (the same twice, for a synthetic sample of {tried}; {hint})"


def _synthetic(shapes: Sequence[MediaShape], flipped: bool) -> Media:
    """Return media of these shapes: gradients, moving in a video, a sweep of tones, and a sentence."""
    parts: dict[str, Any] = {}
    for one in shapes:
        if one.part == "text":
            parts |= {"text": _SENTENCES[flipped], "finish": "stop", "tokens": 5}
            continue
        if one.part == "audio":
            channels, n = one.shape
            sweep = np.sin(np.linspace(0, 1, n) ** 2 * n / 8).astype(np.float32)
            parts |= {"audio": np.repeat(sweep[None], channels, 0), "sample_rate": one.rate}
            continue
        height, width = one.shape[-2:]
        image = _gradient(height, width)[:, :: -1 if flipped else 1]
        if one.part == "image":
            parts["image"] = np.ascontiguousarray(image)
        else:
            frames = np.stack([np.roll(image, frame, axis=-1) for frame in range(one.shape[0])])
            parts |= {"video": frames, "fps": one.rate}
    return Media(**parts)


def _gradient(height: int, width: int) -> NDArray[np.uint8]:
    """Return (3, height, width): red grows to the right, green downwards, blue falls; no two rows are alike."""
    down, right = np.linspace(0, 255, height)[:, None], np.linspace(0, 255, width)[None, :]
    planes = np.broadcast_arrays(right, down, 255 - (down + right) / 2)
    return np.stack(planes).astype(np.uint8)
