"""Runs HunyuanVideo-1.5 text-to-video in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.hunyuan_video import HunyuanVideo15Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.hunyuan_video_15.policy import HunyuanVideo15Policy
from omni_async_pipelines.hunyuan_video_15.sampling import HunyuanVideo15Sampling


class HunyuanVideo15RolloutPipeline(RolloutPipelineMixin, HunyuanVideo15Pipeline):
    policy_class = HunyuanVideo15Policy
    warm_up = HunyuanVideo15Sampling(height=32, width=32, num_frames=5)
