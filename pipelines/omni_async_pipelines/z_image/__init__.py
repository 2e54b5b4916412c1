"""Supports Z-Image and Z-Image-Turbo: text-to-image, captions and image in one stream of tokens.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.z_image.sampling import ZImageSampling

FAMILY = PipelineFamily(
    name="z_image",
    policy="omni_async_pipelines.z_image.policy:ZImagePolicy",
    sampling=ZImageSampling,
    model_index_class="ZImagePipeline",
    vllm_pipeline="omni_async_pipelines.z_image.rollout.ZImageRolloutPipeline",
    comfyui_layers=((r"(.+)", r"diffusion_model.\1"),),
    parity="omni_async_pipelines.z_image.parity:CASES",
)
