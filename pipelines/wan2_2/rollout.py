"""Runs Wan2.2 text-to-video in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from pipelines.wan2_2.policy import Wan22Codec, Wan22Policy
from pipelines.wan2_2.sampling import Wan22Sampling


class Wan22RolloutPipeline(RolloutPipelineMixin, Wan22Pipeline):
    warm_up = Wan22Sampling(height=32, width=32, num_frames=5)

    def make_policy(self, path: str) -> Wan22Policy:
        return Wan22Policy(path)

    def make_codec(self) -> Wan22Codec:
        return Wan22Codec(tokenizer=self.tokenizer, text_encoder=self.text_encoder, vae=self.vae)
