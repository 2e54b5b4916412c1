"""Builds Wan2.2 checkpoints small enough for tests: real architecture, random weights, offline in seconds.

python -m omni_async_pipelines.wan2_2.tiny /tmp/tiny_wan22          # two experts, as Wan2.2-T2V-A14B
python -m omni_async_pipelines.wan2_2.tiny /tmp/tiny_wan22 --ti2v   # one, with a time per token, as Wan2.2-TI2V-5B
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from omni_async_pipelines import tiny

TEXT_WIDTH = 64
BOUNDARY = 0.875


def build_components(
    *, layers: int = 2, heads: int = 2, ti2v: bool = False, corpus: Iterable[str] = tiny.CORPUS, seed: int = 0
) -> WanPipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: each transformer's; heads have 12 features.
        ti2v: one transformer with a time per token, as TI2V-5B, in place of two experts.
        corpus: prompts that the tokenizer is trained on.
        seed: the same one gives the same weights."""
    tokenizer = tiny.t5_tokenizer(corpus)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels = 48 if ti2v else 16
        experts = [expert(channels, layers, heads) for _ in range(1 if ti2v else 2)]
        residual = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2} if ti2v else {}
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=channels,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            scale_factor_spatial=16 if ti2v else 8,
            latents_mean=[0.1] * channels,
            latents_std=[1.5] * channels,
            **residual,
        )
        return WanPipeline(
            tokenizer=cast(Any, tokenizer),
            text_encoder=UMT5EncoderModel(UMT5Config(**tiny.t5_sizes(tokenizer, TEXT_WIDTH))).eval(),
            vae=cast(Any, vae).eval(),
            scheduler=cast(
                Any,
                UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            ),
            transformer=experts[0],
            transformer_2=None if ti2v else experts[1],
            boundary_ratio=None if ti2v else BOUNDARY,
            expand_timesteps=ti2v,
        )


def expert(channels: int, layers: int, heads: int, given: int = 0) -> Any:
    """Build a transformer for latents of `channels` channels, which also takes `given` further channels."""
    model: Any = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=12,  # a multiple of 6: rotary positions of time, height and width
        in_channels=channels + given,
        out_channels=channels,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=48,
        num_layers=layers,
        cross_attn_norm=True,
    )
    tiny.fill_zeros(model)
    return model.eval()


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Wan2.2", ti2v="one transformer with a time per token, as TI2V-5B")
