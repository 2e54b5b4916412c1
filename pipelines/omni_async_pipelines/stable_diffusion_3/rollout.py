"""Runs Stable Diffusion 3 in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.sd3 import StableDiffusion3Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.stable_diffusion_3.policy import StableDiffusion3Policy
from omni_async_pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling


class StableDiffusion3RolloutPipeline(RolloutPipelineMixin, StableDiffusion3Pipeline):
    policy_class = StableDiffusion3Policy
    warm_up = StableDiffusion3Sampling(height=64, width=64)
