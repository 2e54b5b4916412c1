"""Runs Wan2.2 image-to-video in vLLM-Omni, as a rollout engine."""

from __future__ import annotations

from tensordict import TensorDict
from vllm_omni.diffusion.models.wan2_2 import Wan22I2VPipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async.types import SampleRequest
from omni_async_pipelines.wan2_2_i2v.policy import Wan22I2VPolicy
from omni_async_pipelines.wan2_2_i2v.sampling import Wan22I2VSampling


class Wan22I2VRolloutPipeline(RolloutPipelineMixin, Wan22I2VPipeline):
    policy_class = Wan22I2VPolicy
    warm_up = Wan22I2VSampling(height=32, width=32, num_frames=5)

    def encode_warm_up(self, request: SampleRequest) -> TensorDict:
        return self.policy.blank_conditioning(request.spec)
