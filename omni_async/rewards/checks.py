"""What every scorer may assume of its input and owes for its output; the errors name the scorer and the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from omni_async.rewards.base import ScoreError
from omni_async.types import Prompt, Score


def describe(position: int, prompt: Prompt) -> str:
    text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
    return f"sample {position} (prompt {prompt.index}: {text!r})"


def require_images(scorer: str, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> None:
    """As many prompts as images, each image uint8 (height, width, 3) and not empty; ScoreError otherwise."""
    if len(images) != len(prompts):
        raise ScoreError(f"scorer {scorer!r}: {len(images)} images but {len(prompts)} prompts")
    for position, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        dtype, shape = getattr(image, "dtype", type(image).__name__), tuple(getattr(image, "shape", ()))
        if dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            where = describe(position, prompt)
            raise ScoreError(f"scorer {scorer!r}, {where}: expected a uint8 image (height, width, 3), got {dtype} {shape}")


def require_scores(scorer: str, scores: Sequence[Score], prompts: Sequence[Prompt]) -> None:
    """As many scores as prompts, every value and part finite; ScoreError otherwise."""
    if len(scores) != len(prompts):
        raise ScoreError(f"scorer {scorer!r} returned {len(scores)} scores for {len(prompts)} images")
    for position, (score, prompt) in enumerate(zip(scores, prompts, strict=True)):
        for part, number in (("value", score.value), *score.parts.items()):
            if not math.isfinite(number):
                raise ScoreError(f"scorer {scorer!r}, {describe(position, prompt)}: {part} is {number}, expected a finite number")
