"""Embeds images and texts with a CLIP checkpoint of transformers, for the scorers that compare them.

Pillow prepares the images, as for the published scores, in the sizes of the checkpoint's own processor; texts are cut
to the length that the model takes. The model runs in the configured precision; embeddings are float32, and scores
float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.media import evenly
from omni_async.rewards.scorers.pretrained import (
    Precision,
    embedded_texts,
    folder_of,
    load_model,
    missing_file,
    per_sample,
    unit,
    version_of,
    wrong_checkpoint,
)
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media


class Clip:
    """A CLIP checkpoint on a device. `logit_scale` is its learnt factor, in float32 whatever the precision.

    `version`: everything else that its embeddings depend on, apart from the parameters, see `version_of`."""

    def __init__(self, path: str, processor: str | None, device: str, dtype: Precision, batch: int) -> None:
        import torch
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

        prepared = folder_of(processor or path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(prepared, local_files_only=True)
        self._prepare: Any = CLIPImageProcessorPil.from_pretrained(prepared, local_files_only=True)
        model = load_model(CLIPModel, path)
        self.logit_scale = float(model.logit_scale.exp())
        self.width = int(model.config.projection_dim)
        self.version = version_of(model, prepared, device)
        self._longest = int(model.config.text_config.max_position_embeddings)
        self._model = model.to(device, getattr(torch, dtype))
        self._device, self._dtype, self._batch = device, getattr(torch, dtype), batch

    def images(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Return the embeddings of images uint8 (height, width, 3), each of norm 1: float32 (images, width)."""
        found = []
        for start in range(0, len(images), self._batch):
            some = list(images[start : start + self._batch])
            pixels = self._prepare(some, return_tensors="pt", input_data_format="channels_last").pixel_values
            features = self._model.get_image_features(pixel_values=pixels.to(self._device, self._dtype))
            found.append(unit(features.pooler_output))
        return np.concatenate(found)

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of texts, each of norm 1: float32 (texts, width). The same text is embedded once."""

        def embed(some: list[str]) -> Any:
            tokens = self._tokenizer(
                some, padding="max_length", truncation=True, max_length=self._longest, return_tensors="pt"
            ).to(self._device)
            found = self._model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
            return found.pooler_output

        return embedded_texts(texts, self._batch, embed)


def frames_of(media: Media, count: int) -> list[NDArray[np.uint8]]:
    """Return the frames of a sample to score: its image, or `count` evenly spaced frames of its video."""
    return list(evenly(media.frames, count)) if media.image is None else [media.pixels]


class PromptAlignmentScorer(ABC):
    """The base of scorers that are a function of the cosine between image and prompt.

    A video scores the mean over `frames` evenly spaced frames.

    Args:
        path: a CLIP checkpoint in transformers' layout.
        processor: the folder of tokenizer and image processor, if they are not in `path`.
        dtype: the precision of the model.
        frames: the number of frames to score of a video.
        batch: images and texts per forward pass of the model.
        device: the reward worker's, passed by the run."""

    name = "prompt_alignment"
    accepts: tuple[str, ...] = ("image", "video")
    cost = "model"
    deterministic = True

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Annotated[int, Meta(ge=1)] = 4,
        batch: Annotated[int, Meta(ge=1)] = 32,
        device: str,
    ) -> None:
        self._frames = frames
        self._clip = Clip(path, processor, device, dtype, batch)
        self.version = self._clip.version

    @staticmethod
    def check_params(params: dict[str, Any]) -> str | None:
        """Require the checkpoint's files."""
        return missing_clip(params)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        frames = [[self._shown(frame) for frame in frames_of(one, self._frames)] for one in media]
        images = self._clip.images([frame for some in frames for frame in some])
        texts = self._clip.texts([prompt.text for prompt in prompts])
        return [
            self._judge(rows.astype(np.float64) @ text.astype(np.float64))
            for rows, text in zip(per_sample(images, frames), texts, strict=True)
        ]

    def _shown(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return frame

    @abstractmethod
    def _judge(self, cosines: NDArray[np.float64]) -> Score:
        """Return the score of a sample whose frames have these cosines with its prompt."""


def missing_clip(params: dict[str, Any]) -> str | None:
    """Return an error about a missing file named by the parameters of a scorer on CLIP, or None."""
    wrong = wrong_checkpoint(params["path"], "clip")
    if wrong is None and params["processor"] is not None:
        wrong = missing_file("processor", params["processor"])
    return wrong
