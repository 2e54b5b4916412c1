"""Runs Z-Image in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm_omni.diffusion.models.z_image import pipeline_z_image
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.z_image.policy import ZImagePolicy
from omni_async_pipelines.z_image.sampling import CAPTION_TOKENS, ZImageSampling


class _NativePolicy(ZImagePolicy):
    def call(self, denoiser: torch.nn.Module, **inputs: Any) -> Any:
        """Run rows together if their captions take equally many tokens: vLLM-Omni's attention masks no padding."""
        latents, times, captions = (inputs[name] for name in ("hidden_states", "t", "cap_feats"))
        rows_of: dict[int, list[int]] = {}
        for row, caption in enumerate(captions):
            rows_of.setdefault(-(len(caption) // -CAPTION_TOKENS), []).append(row)
        velocity = torch.empty_like(latents)
        for rows in rows_of.values():
            some = {"hidden_states": latents[rows], "t": times[rows], "cap_feats": [captions[row] for row in rows]}
            velocity[rows] = super().call(denoiser, **some)[0]
        return (velocity,)


class _NativePipeline(pipeline_z_image.ZImagePipeline):
    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        """Build the denoiser with the checkpoint's sizes, in place of the published model's."""
        native = pipeline_z_image.ZImageTransformer2DModel
        sizes = get_transformer_config_kwargs(od_config.tf_model_config, native)
        pipeline_z_image.ZImageTransformer2DModel = partial(native, **sizes)
        try:
            super().__init__(od_config=od_config, prefix=prefix)
        finally:
            pipeline_z_image.ZImageTransformer2DModel = native


class ZImageRolloutPipeline(RolloutPipelineMixin, _NativePipeline):
    policy_class = _NativePolicy
    warm_up = ZImageSampling(height=64, width=64)
