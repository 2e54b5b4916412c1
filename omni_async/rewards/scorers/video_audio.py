"""Scores how well the sound of a video fits its picture, by a PE-AV checkpoint of transformers.

Perception Encoder Audiovisual (Vyas et al. 2025) embeds sound and video in one space. Sound is averaged over its
channels and resampled to the rate of the checkpoint. Samples are embedded one at a time, so that none is padded, and a
score does not depend on the rest of its batch.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.media import evenly
from omni_async.rewards.scorers.clap import mono_at
from omni_async.rewards.scorers.model_scorer import Count, ModelScorer
from omni_async.rewards.scorers.pretrained import Precision, folder_of, load_model, load_part, unit
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media


class VideoAudioScorer(ModelScorer):
    """A scorer with value = cosine of video and sound, in [-1, 1].

    Part `logit`: the checkpoint's logit for both; its sigmoid is the probability that they belong together.

    `path`: a PE-AV checkpoint. `frames`: the number of evenly spaced frames to use; None: all of them."""

    name = "video_audio"
    accepts = ("video", "audio")
    requires = ("video", "audio")
    model_type = "pe_audio_video"
    files = ("processor",)

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Count | None = None,
        device: str,
    ) -> None:
        from transformers import PeAudioFeatureExtractor, PeAudioVideoModel, PeVideoVideoProcessor

        super().__init__(dtype=dtype, frames=frames, device=device)
        prepared = folder_of(processor or path)
        self._extract = load_part(PeAudioFeatureExtractor, prepared)
        self._prepare = load_part(PeVideoVideoProcessor, prepared)
        libraries = (f"{name} {metadata.version(name)}" for name in ("av", "timm"))
        self._set_model(load_model(PeAudioVideoModel, path), prepared, *libraries)

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require the checkpoint's files, and the library of its image encoder."""
        wrong = super().check_params(params)
        if wrong is None and find_spec("timm") is None:
            wrong = "transformers has PE-AV's image encoder from timm, which is not there: pip install 'timm<1.0.27'"
        return wrong

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [self._score(one) for one in media]

    def _score(self, media: Media) -> Score:
        import torch

        rate = int(self._extract.sampling_rate)
        heard = torch.from_numpy(np.stack(self._extract([mono_at(rate, media)], sampling_rate=rate).input_values))
        shown = np.ascontiguousarray(evenly(media.frames, self._frames))
        frames = torch.from_numpy(shown).permute(0, 3, 1, 2)
        seen = self._prepare(videos=[frames], do_sample_frames=False, return_tensors="pt").pixel_values_videos
        found = self._model(
            input_values=heard.to(self._device, self._dtype), pixel_values_videos=seen.to(self._device, self._dtype)
        )
        sound, video = (unit(rows).astype(np.float64)[0] for rows in (found.audio_embeds, found.video_embeds))
        return Score(float(sound @ video), {"logit": float(found.logits_audio_video[0, 0])})
