"""Builds a FLUX.1 checkpoint small enough for tests: real architecture, random weights, offline in seconds.

python -m omni_async_pipelines.flux.tiny /tmp/tiny_flux
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from omni_async_pipelines import tiny

_DEV_SCHEDULE = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}


def build_components(
    *, layers: int = 2, heads: int = 2, hidden: int = 32, schnell: bool = False, seed: int = 0
) -> FluxPipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers: the transformer's with two streams, and as many with one.
        heads: the transformer's, with 16 features each.
        hidden: features of CLIP; T5 has twice as many.
        schnell: as [schnell], without the guidance as an input and with an unshifted schedule.
        seed: the same one gives the same weights."""
    clip, t5 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer: Any = FluxTransformer2DModel(
            in_channels=64,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=2 * hidden,
            pooled_projection_dim=hidden,
            guidance_embeds=not schnell,
            axes_dims_rope=(4, 6, 6),
        )
        tiny.fill_zeros(transformer)
        return FluxPipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(**({} if schnell else _DEV_SCHEDULE)),
            vae=tiny.image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=tiny.clip_encoder(CLIPTextModel, clip, hidden),
            tokenizer=clip,
            text_encoder_2=T5EncoderModel(T5Config(**tiny.t5_sizes(t5, 2 * hidden))).eval(),
            tokenizer_2=cast(Any, t5),
        )


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "FLUX.1", schnell="as [schnell]: no guidance input, an unshifted schedule")
