"""Runs Qwen-Image-Edit in vLLM-Omni, as a rollout engine."""

from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image_edit import QwenImageEditPipeline

from omni_async.rollout.vllm_worker import RolloutPipelineMixin
from omni_async.rollout.vllm_worker import pass_through as pass_through  # for vLLM-Omni
from omni_async_pipelines.qwen_image.rollout import NativePolicy
from omni_async_pipelines.qwen_image_edit.policy import QwenImageEditPolicy
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling


class _NativePolicy(QwenImageEditPolicy, NativePolicy):
    """Edit's policy, which calls vLLM-Omni's denoiser as Qwen-Image's does."""


class QwenImageEditRolloutPipeline(RolloutPipelineMixin, QwenImageEditPipeline):
    policy_class = _NativePolicy
    warm_up = QwenImageEditSampling(height=64, width=64)
