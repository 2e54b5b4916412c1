"""Shares what scorers with a model in the reward worker need: checked files, a version, batches, frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.media import evenly
from omni_async.rewards.base import Scorer
from omni_async.rewards.scorers.pretrained import Precision, in_batches, missing_file, version_of, wrong_checkpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media
    from omni_async.types import Prompt

    # (images, their texts) -> a row for each image: (images, width)
    Read = Callable[[list[NDArray[np.uint8]], list[str]], NDArray[Any]]

Count = Annotated[int, Meta(ge=1)]


class ModelScorer(Scorer):
    """The base of scorers on a model of transformers.

    A constructor loads the model and gives it to `_set_model`, or keeps it in an object such as `clip.Clip`.

    Two attributes of a class declare the files that `check_params` requires:

    model_type     the kind of the checkpoint in the folder `path`, as its config.json names it
    files          further parameters that name a file or a folder, if they are not None

    The parameters of these scorers have the same meaning in all of them:

    path           a checkpoint in transformers' layout
    processor      the folder of tokenizer and image processor (or feature extractor), if they are not in `path`
    dtype          the precision of the model
    frames         the number of evenly spaced frames to score of a video
    batch          images, sounds or texts per forward pass of the model
    device         the reward worker's, passed by the run"""

    accepts: tuple[str, ...] = ("image", "video")
    cost = "model"
    deterministic = True
    model_type = ""
    files: tuple[str, ...] = ()

    def __init__(self, *, dtype: Precision, frames: int | None = None, batch: int = 1, device: str) -> None:
        import torch

        self._device, self._dtype = device, getattr(torch, dtype)
        self._frames, self._batch = frames, batch

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require the checkpoint, of its kind, and the further files."""
        missing = (missing_file(name, params[name]) for name in cls.files if params[name] is not None)
        return wrong_checkpoint(params["path"], cls.model_type) or next(filter(None, missing), None)

    def _set_model(self, model: Any, prepared: Path, *more: str) -> None:
        """Move a model that was loaded on the CPU to its device and precision.

        `version` becomes that of the model, of its processor's files in the folder `prepared`, and `more`."""
        self.version = ", ".join((version_of(model, prepared, self._device), *more))
        self._model = model.to(self._device, self._dtype)

    def _shown(self, media: Sequence[Media]) -> list[list[NDArray[np.uint8]]]:
        """Return the frames to score of each sample, uint8 (height, width, 3): its image, or those of its video."""
        return [[one.pixels] if one.image is not None else [*evenly(one.frames, self._frames)] for one in media]

    def _read_all(
        self, read: Read, shown: Sequence[Sequence[NDArray[np.uint8]]], prompts: Sequence[Prompt]
    ) -> NDArray[Any]:
        """Return the rows of `read` for all frames, each with its sample's text: (frames of all samples, width)."""
        texts = [prompt.text for prompt, some in zip(prompts, shown, strict=True) for _ in some]
        return in_batches(self._batch, read, [frame for some in shown for frame in some], texts)
