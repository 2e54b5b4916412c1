"""Draws samples of several models for the same prompts and noise as one picture, with the models side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import Model
from omni_async.records.write.images import image_grid, tile
from omni_async.types import SampleRequest, Score

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_TILES = 64
_ABSENT = (24, 24, 3)  # height, width and channels of the tile of a sample that was not drawn


def grid(gallery: Gallery, models: Sequence[Model], requests: Sequence[SampleRequest]) -> Image | None:
    """Return the picture of `omni-async sample`: all samples, at most 64 tiles; several models are side by side.

    None if there are no samples. Raises ConfigError if a file cannot be read."""
    several = len(models) > 1

    def said(model: Model, request: SampleRequest) -> str:
        return f"{model.label}\n{request.prompt.text}" if several else request.prompt.text

    shown = requests[: max(1, _MOST_TILES // len(models))]
    # All models of a sample are adjacent; the number of samples in a row makes the picture about square.
    in_a_row = max(1, round(math.sqrt(len(shown) / len(models)))) if several else 1
    return _picture(gallery, models, shown, said, in_a_row * len(models) if several else None)


def filmstrip(gallery: Gallery, models: Sequence[Model], requests: Sequence[SampleRequest], rows: int) -> Image | None:
    """Return a row per prompt, `rows` at most, with its first sample by every model and the reward of each.

    None if there are no samples. Raises ConfigError if a file cannot be read."""
    scores = gallery.scores
    first = [request for request in requests if request.sample == 0][:rows]

    def said(model: Model, request: SampleRequest) -> str:
        score = scores[model.label].get((request.prompt.index, 0))
        return f"{model.label}: {_brief(score)}\n{request.prompt.text}"

    return _picture(gallery, models, first, said, len(models))


def _brief(score: Score | None) -> str:
    if score is None:
        return "no reward"
    return f"{score.value:.2f}" + ("" if score.text is None else f"  read {score.text!r}")


def _picture(
    gallery: Gallery,
    models: Sequence[Model],
    requests: Sequence[SampleRequest],
    said: Callable[[Model, SampleRequest], str],
    columns: int | None,
) -> Image | None:
    cells = [(model, request, gallery.sample(model.label, request)) for request in requests for model in models]
    if not any(sample for _, _, sample in cells):
        return None
    items = [
        (np.zeros(_ABSENT, np.uint8) if sample is None else tile(sample.media()), said(model, request))
        for model, request, sample in cells
    ]
    return image_grid(items, columns=columns)
