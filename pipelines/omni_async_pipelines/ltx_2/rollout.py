"""Runs LTX-2 in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.ltx2 import LTX2Pipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.ltx_2.policy import LTX2Policy
from omni_async_pipelines.ltx_2.sampling import LTX2Sampling


class LTX2RolloutPipeline(RolloutPipelineMixin, LTX2Pipeline):
    policy_class = LTX2Policy
    warm_up = LTX2Sampling(height=64, width=64, num_frames=9)
