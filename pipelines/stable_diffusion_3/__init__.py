"""Stable Diffusion 3 and 3.5: a text-to-image MMDiT with two CLIP encoders, T5 and a 16-channel VAE.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

FAMILY = PipelineFamily(
    name="stable_diffusion_3",
    policy="pipelines.stable_diffusion_3.policy:StableDiffusion3Policy",
    sampling=StableDiffusion3Sampling,
    model_index_class="StableDiffusion3Pipeline",
    vllm_pipeline="pipelines.stable_diffusion_3.rollout.StableDiffusion3RolloutPipeline",
    attention_heads="num_attention_heads",
    comfyui_layers=((r"(.+)", r"transformer.\1"),),
    parity="pipelines.stable_diffusion_3.parity:CASES",
)
