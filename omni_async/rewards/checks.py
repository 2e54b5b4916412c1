"""What every scorer may assume of its input and owes for its output; the errors name the scorer and the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

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


def require_scores(scorer: str, scores: Any, prompts: Sequence[Prompt]) -> list[Score]:
    """The scores, with plain floats for numbers: as many as prompts, every value and part a finite number. ScoreError otherwise, whatever a scorer
    may have returned."""
    if not isinstance(scores, list | tuple):
        raise ScoreError(f"scorer {scorer!r} returned a {_kind(scores)}, expected a list of Score")
    if len(scores) != len(prompts):
        raise ScoreError(f"scorer {scorer!r} returned {len(scores)} scores for {len(prompts)} images")
    return [
        _require_score(f"scorer {scorer!r}, {describe(position, prompt)}", score)
        for position, (score, prompt) in enumerate(zip(scores, prompts, strict=True))
    ]


def _require_score(where: str, score: Any) -> Score:
    if not isinstance(score, Score):
        raise ScoreError(f"{where}: a {_kind(score)}, expected a Score")
    if not isinstance(score.parts, dict) or not all(isinstance(part, str) for part in score.parts):
        raise ScoreError(f"{where}: parts is {score.parts!r}, expected a dict of named numbers")
    if not isinstance(score.text, str | None):
        raise ScoreError(f"{where}: text is a {_kind(score.text)}, expected a str or None")
    if not isinstance(score.values, tuple):
        raise ScoreError(f"{where}: values is a {_kind(score.values)}, expected a tuple of numbers")
    value = _finite(where, "value", score.value)
    parts = {part: _finite(where, part, number) for part, number in score.parts.items()}
    values = tuple(_finite(where, f"values[{i}]", number) for i, number in enumerate(score.values))
    return Score(value, parts, score.text, values)


def _finite(where: str, part: str, number: Any) -> float:
    # NumPy's scalars are Real but for its bool. Whether something is right is a score, of 0 or 1.
    if not isinstance(number, Real | np.bool_):
        raise ScoreError(f"{where}: {part} is a {_kind(number)}, expected a number")
    if not math.isfinite(number):
        raise ScoreError(f"{where}: {part} is {number}, expected a finite number")
    return float(number)


def _kind(thing: Any) -> str:
    return f"{type(thing).__name__} of shape {tuple(thing.shape)}" if hasattr(thing, "shape") else type(thing).__name__
