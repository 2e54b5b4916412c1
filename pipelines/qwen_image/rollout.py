"""Runs Qwen-Image in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy
from pipelines.qwen_image.sampling import QwenImageSampling


class _NativePolicy(QwenImagePolicy):
    def call(self, transformer: torch.nn.Module, **inputs: Any) -> Any:
        """Add the texts' padded length, which vLLM-Omni's denoiser does not take from their embeddings."""
        num_rows, length = inputs["encoder_hidden_states"].shape[:2]
        return transformer(txt_seq_lens=[length] * num_rows, **inputs)


class QwenImageRolloutPipeline(RolloutPipelineMixin, QwenImagePipeline):
    warm_up = QwenImageSampling(height=64, width=64)

    def make_policy(self, path: str) -> QwenImagePolicy:
        return _NativePolicy(path)

    def make_codec(self) -> QwenImageCodec:
        return QwenImageCodec(tokenizer=self.tokenizer, text_encoder=self.text_encoder, vae=self.vae)
