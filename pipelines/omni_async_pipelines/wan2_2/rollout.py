"""Runs Wan2.2 text-to-video in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.wan2_2 import Wan22Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.wan2_2.policy import Wan22Policy
from omni_async_pipelines.wan2_2.sampling import Wan22Sampling


class Wan22RolloutPipeline(RolloutPipelineMixin, Wan22Pipeline):
    policy_class = Wan22Policy
    warm_up = Wan22Sampling(height=32, width=32, num_frames=5)
