"""Supports Qwen-Image: a text-to-image MMDiT with a Qwen2.5-VL text encoder and a 16-channel VAE.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling

FAMILY = PipelineFamily(
    name="qwen_image",
    policy="omni_async_pipelines.qwen_image.policy:QwenImagePolicy",
    sampling=QwenImageSampling,
    model_index_class="QwenImagePipeline",
    vllm_pipeline="omni_async_pipelines.qwen_image.rollout.QwenImageRolloutPipeline",
    attention_heads="num_attention_heads",
    comfyui_layers=((r"(.+)", r"diffusion_model.\1"),),
    parity="omni_async_pipelines.qwen_image.parity:CASES",
)
