"""What a scorer is: a function from a batch of images and prompts to finite scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


class ScoreError(RuntimeError):
    """A sample could not be scored. It is retried, then its group is rejected; it never becomes a number."""


class Scorer(Protocol):
    name: str

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        """Blocking, called in a worker thread, one call at a time. Images are uint8 (height, width, 3). As many scores as images, all
        finite; raise anything otherwise."""
