"""Runs FLUX.1 in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from vllm_omni.diffusion.models.flux import FluxPipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.flux.policy import FluxPolicy
from omni_async_pipelines.flux.sampling import FluxSampling


class FluxRolloutPipeline(RolloutPipelineMixin, FluxPipeline):
    policy_class = FluxPolicy
    warm_up = FluxSampling(height=64, width=64)
