"""Runs Qwen-Image in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.types import SampleRequest
from pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy, combine_guidance


class QwenImageRolloutPipeline(RolloutPipelineMixin, QwenImagePipeline):
    # Attributes that the native pipeline sets per call in code that `prepare_encode` replaces.
    _interrupt = False
    _attention_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only

    def make_policy(self, path: str) -> QwenImagePolicy:
        return QwenImagePolicy(path)

    def make_codec(self) -> QwenImageCodec:
        return QwenImageCodec(tokenizer=self.tokenizer, text_encoder=self.text_encoder, vae=self.vae)

    def fill_state(self, state: Any, request: SampleRequest, conditioning: TensorDict) -> None:
        state.do_true_cfg = request.true_cfg_scale > 1
        state.sampling.cfg_normalize = True
        for branch in ("prompt", "negative_prompt") if state.do_true_cfg else ("prompt",):
            setattr(state, f"{branch}_embeds", conditioning[f"{branch}_embeds"][None].to(self.model_dtype))
            setattr(state, f"{branch}_embeds_mask", conditioning[f"{branch}_mask"][None])
        pixels = self.vae_scale_factor * 2
        state.img_shapes = [[(1, request.height // pixels, request.width // pixels)]]

    def _build_denoise_kwargs(self, latents: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        positive, negative, output_slice = super()._build_denoise_kwargs(latents, timestep, *args, **kwargs)
        # The native code rounds the timestep to the model's dtype before dividing; the trainer feeds sigma, rounded
        # once.
        for branch in filter(None, (positive, negative)):
            branch["timestep"] = timestep.float() / 1000.0
        return positive, negative, output_slice

    def combine_cfg_noise(
        self, positive_noise_pred: Any, negative_noise_pred: Any, true_cfg_scale: float, *args: Any, **kwargs: Any
    ) -> Any:
        # Same formula as the native one, but in float32 whatever the model's dtype, as the trainer does it.
        cond, uncond = (p[0] if isinstance(p, tuple) else p for p in (positive_noise_pred, negative_noise_pred))
        return combine_guidance(cond.float(), uncond.float(), true_cfg_scale)
