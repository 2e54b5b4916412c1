"""Runs Stable Diffusion 3 in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from pipelines.stable_diffusion_3.policy import StableDiffusion3Codec, StableDiffusion3Policy
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling


class StableDiffusion3RolloutPipeline(RolloutPipelineMixin, StableDiffusion3Pipeline):
    warm_up = StableDiffusion3Sampling(height=64, width=64)

    def make_policy(self, path: str) -> StableDiffusion3Policy:
        return StableDiffusion3Policy(path)

    def make_codec(self) -> StableDiffusion3Codec:
        names = [f"{part}{number}" for part in ("tokenizer", "text_encoder") for number in ("", "_2", "_3")]
        return StableDiffusion3Codec(vae=self.vae, **{name: getattr(self, name) for name in names})
