"""Scores how well sound fits its prompt, by a CLAP checkpoint of transformers (Wu et al. 2023, arXiv:2211.06687).

Sound is averaged over its channels and resampled to the rate of the checkpoint. Sound longer than the checkpoint takes
(10 s) is scored in as few windows as cover it, evenly spaced, and the value is their mean. The checkpoint's own feature
extractor would cut at random, and the same sound would get another score every time.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.data import audio_files
from omni_async.rewards.base import ScoreError
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
)
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media

_MOST_TOKENS = 512


class ClapScorer(ModelScorer):
    """A scorer with value = cosine, in [-1, 1].

    `path`: a CLAP checkpoint. `batch`: windows of sound, and texts, per forward pass of the model."""

    name = "clap"
    accepts = ("audio",)
    model_type = "clap"
    files = ("processor",)

    def __init__(
        self, *, path: str, processor: str | None = None, dtype: Precision = "float32", batch: Count = 16, device: str
    ) -> None:
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        super().__init__(dtype=dtype, batch=batch, device=device)
        prepared = folder_of(processor or path)
        self._tokenizer = load_part(AutoTokenizer, prepared)
        self._extract = load_part(ClapFeatureExtractor, prepared)
        model = load_model(ClapModel, path)
        # RoBERTa's positions begin after its padding index.
        positions = model.config.text_config.max_position_embeddings - model.config.text_config.pad_token_id - 1
        self._most_tokens = min(self._tokenizer.model_max_length, positions, _MOST_TOKENS)
        self._set_model(model, prepared, f"pyav {metadata.version('av')}")

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        rate, longest = int(self._extract.sampling_rate), int(self._extract.nb_max_samples)
        heard = [windows(mono_at(rate, one), longest) for one in media]
        sounds = in_batches(self._batch, self._hear, [window for some in heard for window in some]).astype(np.float64)
        texts = embedded_texts([prompt.text for prompt in prompts], self._batch, self._embed).astype(np.float64)
        rows = zip(per_sample(sounds, heard), texts, strict=True)
        return [Score(float((some @ text).mean())) for some, text in rows]

    def _hear(self, some: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        import torch

        features = self._extract(some, sampling_rate=self._extract.sampling_rate, return_tensors="pt").input_features
        # The extractor marks a random window as longer than it is.
        is_longer = torch.zeros(len(some), 1, dtype=torch.bool, device=self._device)
        embedded = self._model.get_audio_features(features.to(self._device, self._dtype), is_longer=is_longer)
        return unit(embedded.pooler_output)

    def _embed(self, texts: list[str]) -> Any:
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._most_tokens, return_tensors="pt"
        ).to(self._device)
        found = self._model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        return found.pooler_output


def mono_at(rate: int, media: Media) -> NDArray[np.float32]:
    """Return the mean of the channels, float32 (n), at `rate` samples a second. ScoreError for too long a sound."""
    try:
        return audio_files.mono_at(rate, media)
    except ValueError as error:
        raise ScoreError(str(error)) from None


def windows(sound: NDArray[np.float32], longest: int) -> list[NDArray[np.float32]]:
    """Return the fewest windows of at most `longest` samples that cover the sound, evenly spaced from start to end."""
    count = -(-len(sound) // longest)
    if count <= 1:
        return [sound]
    last = len(sound) - longest
    starts = [round(i * last / (count - 1)) for i in range(count)]
    return [sound[start : start + longest] for start in starts]
