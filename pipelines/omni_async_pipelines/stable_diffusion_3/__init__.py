"""Supports Stable Diffusion 3 and 3.5: a text-to-image MMDiT with two CLIP encoders, T5 and a 16-channel VAE.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

FAMILY = PipelineFamily(
    name="stable_diffusion_3",
    policy="omni_async_pipelines.stable_diffusion_3.policy:StableDiffusion3Policy",
    sampling=StableDiffusion3Sampling,
    model_index_class="StableDiffusion3Pipeline",
    vllm_pipeline="omni_async_pipelines.stable_diffusion_3.rollout.StableDiffusion3RolloutPipeline",
    attention_heads="num_attention_heads",
    comfyui_layers=((r"(.+)", r"transformer.\1"),),
    parity="omni_async_pipelines.stable_diffusion_3.parity:CASES",
)
