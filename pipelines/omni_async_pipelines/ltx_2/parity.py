"""Defines the comparisons of `omni-async parity` for LTX-2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_async.commands.parity.case import Case, Upstream, built
from omni_async.types import Prompt
from omni_async_pipelines.ltx_2.sampling import LTX2Sampling

if TYPE_CHECKING:
    from torch import Tensor

_OTHER_GUIDANCE = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}


class LTX2Upstream(Upstream):
    """diffusers' pipeline with only classifier-free guidance. It generates both media in one call."""

    def arguments(self, prompt: Prompt, spec: Any) -> dict[str, Any]:
        off = {f"{part}{scale}": value for part in ("", "audio_") for scale, value in _OTHER_GUIDANCE.items()}
        return {**super().arguments(prompt, spec), **off, "frame_rate": spec.fps}

    def latents(self, prompt: Prompt, spec: Any, noise: Tensor) -> Tensor:
        return self._draw(prompt, spec, noise)[0]

    def media(self, prompt: Prompt, spec: Any, noise: Tensor) -> dict[str, Tensor]:
        _, video, audio = self._draw(prompt, spec, noise)
        return {"video": video * 255, "audio": audio}

    def _draw(self, prompt: Prompt, spec: Any, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        pipeline, last = self.pipeline, {}
        video, audio = noise.split(spec.lengths, dim=1)
        audio = audio * pipeline.audio_vae.latents_std + pipeline.audio_vae.latents_mean  # the pipeline inverts this

        def remember(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            last.update(tensors)
            return {}

        pipeline._callback_tensor_inputs = [*type(pipeline)._callback_tensor_inputs, "audio_latents"]
        videos, sounds = pipeline(
            **self.arguments(prompt, spec),
            latents=video.clone(),
            audio_latents=audio,
            callback_on_step_end=remember,
            callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
            output_type="pt",
            return_dict=False,
        )
        return torch.cat([last["latents"], last["audio_latents"]], dim=1), videos[0], sounds[0]


CASES = (
    Case(
        specs=(
            LTX2Sampling(height=64, width=96, num_frames=9, fps=25.0, max_sequence_length=32),
            LTX2Sampling(
                height=64,
                width=64,
                num_frames=17,
                guidance_scale=3.0,
                audio_guidance_scale=7.0,
                negative_prompt="dull",
                max_sequence_length=32,
            ),
        ),
        build=built("omni_async_pipelines.ltx_2.tiny:build", layers=2),
        upstream=LTX2Upstream,
    ),
)
