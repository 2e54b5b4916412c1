"""Builds a Stable Diffusion 3.5 checkpoint small enough for tests.

Real architecture, random weights, offline in seconds.

    python -m omni_async_pipelines.stable_diffusion_3.tiny /tmp/tiny_sd35
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from omni_async_pipelines import tiny

LATENT_CHANNELS = 16


def build_components(*, layers: int = 3, heads: int = 2, hidden: int = 32, seed: int = 0) -> StableDiffusion3Pipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: the transformer's; heads have 16 features.
        hidden: features of each CLIP encoder; T5 has twice as many.
        seed: the same one gives the same weights."""
    clip, t5 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer: Any = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=2 * hidden,
            caption_projection_dim=16 * heads,
            pooled_projection_dim=2 * hidden,
            pos_embed_max_size=32,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        tiny.fill_zeros(transformer)
        vae = tiny.image_vae(scaling_factor=1.5305, shift_factor=0.0609)
        return StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae,
            text_encoder=tiny.clip_encoder(CLIPTextModelWithProjection, clip, hidden),
            tokenizer=clip,
            text_encoder_2=tiny.clip_encoder(CLIPTextModelWithProjection, clip, hidden),
            tokenizer_2=clip,
            text_encoder_3=T5EncoderModel(T5Config(**tiny.t5_sizes(t5, 2 * hidden))).eval(),
            tokenizer_3=cast(Any, t5),
        )


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Stable Diffusion 3.5")
