"""Supports Qwen-Image-Edit: Qwen-Image's denoiser, trained to edit a prompt's image.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling

FAMILY = PipelineFamily(
    name="qwen_image_edit",
    policy="omni_async_pipelines.qwen_image_edit.policy:QwenImageEditPolicy",
    sampling=QwenImageEditSampling,
    model_index_class="QwenImageEditPipeline",
    vllm_pipeline="omni_async_pipelines.qwen_image_edit.rollout.QwenImageEditRolloutPipeline",
    prompt_images=1,
    attention_heads="num_attention_heads",
    comfyui_layers=((r"(.+)", r"diffusion_model.\1"),),
    parity="omni_async_pipelines.qwen_image_edit.parity:CASES",
)
