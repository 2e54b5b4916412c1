"""Runs Qwen-Image in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling


class NativePolicy(QwenImagePolicy):
    """The policy with vLLM-Omni's denoiser."""

    def call(self, denoiser: torch.nn.Module, **inputs: Any) -> Any:
        """Add the texts' padded length, which vLLM-Omni's denoiser does not derive from their embeddings."""
        num_rows, length = inputs["encoder_hidden_states"].shape[:2]
        return super().call(denoiser, txt_seq_lens=[length] * num_rows, **inputs)


class QwenImageRolloutPipeline(RolloutPipelineMixin, QwenImagePipeline):
    policy_class = NativePolicy
    warm_up = QwenImageSampling(height=64, width=64)
