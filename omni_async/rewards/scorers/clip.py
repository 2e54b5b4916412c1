"""Embeds images and texts with a CLIP checkpoint of transformers, for the scorers that compare them.

Pillow prepares the images, as for the published scores, in the sizes of the checkpoint's own processor; texts are cut
to the length that the model takes. The model runs in the configured precision; embeddings are float32, and scores
float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.rewards.scorers.model_scorer import Count, ModelScorer
from omni_async.rewards.scorers.pretrained import (
    Precision,
    embedded_texts,
    folder_of,
    in_batches,
    load_model,
    load_part,
    per_sample,
    unit,
    version_of,
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
        self._tokenizer = load_part(AutoTokenizer, prepared)
        self._prepare = load_part(CLIPImageProcessorPil, prepared)
        model = load_model(CLIPModel, path)
        self.logit_scale = float(model.logit_scale.exp())
        self.width = int(model.config.projection_dim)
        self.version = version_of(model, prepared, device)
        self._longest = int(model.config.text_config.max_position_embeddings)
        self._model = model.to(device, getattr(torch, dtype))
        self._device, self._dtype, self._batch = device, getattr(torch, dtype), batch

    def images(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Return the embeddings of images uint8 (height, width, 3), each of norm 1: float32 (images, width)."""

        def embed(some: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
            pixels = self._prepare(some, return_tensors="pt", input_data_format="channels_last").pixel_values
            features = self._model.get_image_features(pixel_values=pixels.to(self._device, self._dtype))
            return unit(features.pooler_output)

        return in_batches(self._batch, embed, images)

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of texts, each of norm 1: float32 (texts, width). The same text is embedded once."""

        def embed(some: list[str]) -> Any:
            tokens = self._tokenizer(
                some, padding="max_length", truncation=True, max_length=self._longest, return_tensors="pt"
            ).to(self._device)
            found = self._model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
            return found.pooler_output

        return embedded_texts(texts, self._batch, embed)


class ClipScorer(ModelScorer):
    """The base of scorers on a CLIP checkpoint, `_clip`, which holds the model and its device."""

    model_type = "clip"
    files: tuple[str, ...] = ("processor",)

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Count = 4,
        batch: Count = 32,
        device: str,
    ) -> None:
        super().__init__(dtype=dtype, frames=frames, batch=batch, device=device)
        self._clip = Clip(path, processor, device, dtype, batch)
        self.version = self._clip.version

    def _embedded(self, shown: Sequence[Sequence[NDArray[np.uint8]]]) -> NDArray[np.float32]:
        """Return the embeddings of all frames, each of norm 1: float32 (frames of all samples, width)."""
        return self._clip.images([frame for some in shown for frame in some])


class PromptAlignmentScorer(ClipScorer, ABC):
    """The base of scorers that are a function of the cosine between image and prompt.

    A video scores the mean over `frames` evenly spaced frames."""

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        shown = self._shown(media)
        images = per_sample(self._embedded(shown), shown)
        texts = self._clip.texts([prompt.text for prompt in prompts])
        return [
            self._judge(rows.astype(np.float64) @ text.astype(np.float64))
            for rows, text in zip(images, texts, strict=True)
        ]

    @abstractmethod
    def _judge(self, cosines: NDArray[np.float64]) -> Score:
        """Return the score of a sample whose frames have these cosines with its prompt."""
