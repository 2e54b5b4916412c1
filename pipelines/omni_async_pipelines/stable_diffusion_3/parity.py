"""Defines the comparisons of `omni-async parity` for Stable Diffusion 3."""

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

CASES = (
    Case(
        specs=(
            StableDiffusion3Sampling(height=64, width=48, max_sequence_length=32),
            StableDiffusion3Sampling(height=32, width=32, guidance_scale=4.0, negative_prompt="dull"),
        ),
        build=built("omni_async_pipelines.stable_diffusion_3.tiny:build", layers=2),
        idle=("transformer.transformer_blocks.{last}.attn.(add_q_proj|norm_added_q).*",),
    ),
)
