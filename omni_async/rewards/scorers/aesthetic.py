"""Scores how much an image is liked, whatever its prompt: LAION's aesthetic predictors on CLIP's image embeddings.

A predictor is a linear layer, or several without a nonlinearity between them (the "improved" predictor of C. Schuhmann,
sac+logos+ava1-l14-linearMSE; its dropout matters only in training). Either way

    value = W_n ( ... (W_1 e + b_1) ... ) + b_n,    e the embedding, divided by its norm

on about the scale of the ratings it was trained on, 1 to 10. It is meaningful only for the embeddings that it was
trained on; the published predictors were trained on embeddings of OpenAI's ViT-L/14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_async.rewards.scorers.clip import ClipScorer
from omni_async.rewards.scorers.head import Head, read_tensors
from omni_async.rewards.scorers.model_scorer import Count
from omni_async.rewards.scorers.pretrained import Precision, folder_of, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media


class AestheticScorer(ClipScorer):
    """A scorer of images; for a video, the mean over `frames` frames.

    `path`: a CLIP checkpoint. `head`: the predictor's file (.pth, .pt or .safetensors)."""

    name = "aesthetic"
    files = ("processor", "head")

    def __init__(
        self,
        *,
        path: str,
        head: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Count = 4,
        batch: Count = 32,
        device: str,
    ) -> None:
        super().__init__(path=path, processor=processor, dtype=dtype, frames=frames, batch=batch, device=device)
        file = str(folder_of(head))
        self._head = Head(read_tensors(file), f"head: {file}", self._clip.width)
        self.version += f", {self._head.version}"

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        shown = self._shown(media)
        rows = self._head(self._embedded(shown))
        return [Score(float(values.mean())) for values in per_sample(rows[:, 0], shown)]
