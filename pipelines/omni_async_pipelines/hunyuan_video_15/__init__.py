"""Supports HunyuanVideo-1.5 text-to-video: Qwen2.5-VL for the prompt, ByT5 for its quoted texts, a 16x video VAE.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.hunyuan_video_15.sampling import HunyuanVideo15Sampling

FAMILY = PipelineFamily(
    name="hunyuan_video_15",
    policy="omni_async_pipelines.hunyuan_video_15.policy:HunyuanVideo15Policy",
    sampling=HunyuanVideo15Sampling,
    model_index_class="HunyuanVideo15Pipeline",
    vllm_pipeline="omni_async_pipelines.hunyuan_video_15.rollout.HunyuanVideo15RolloutPipeline",
    parity="omni_async_pipelines.hunyuan_video_15.parity:CASES",
)
