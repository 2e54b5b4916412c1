"""Builds an LTX-2 checkpoint small enough for tests: real architecture, random weights, offline in seconds.

python -m omni_async_pipelines.ltx_2.tiny /tmp/tiny_ltx2
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from omni_async_pipelines import tiny

TEXT_WIDTH, TEXT_LAYERS, REGISTERS = 32, 2, 8
CHANNELS = 16  # of a token of the video, and of the sound: MEL_LATENTS bins of as many channels
MEL_LATENTS = 4


def build_components(*, layers: int = 2, heads: int = 2, seed: int = 0) -> LTX2Pipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: the transformer's; heads have 32 features of the video and 16 of the sound.
        seed: the same one gives the same weights."""
    tokenizer = tiny.gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = {
            "text_encoder": _text_encoder(len(tokenizer)),
            "connectors": _connectors(),
            "transformer": _transformer(layers, heads),
            "vae": AutoencoderKLLTX2Video(
                latent_channels=CHANNELS,
                block_out_channels=(8, 16, 32, 64),
                decoder_block_out_channels=(8, 16, 32),
                layers_per_block=(1,) * 5,
                decoder_layers_per_block=(1,) * 4,
                spatial_compression_ratio=32,
                temporal_compression_ratio=8,
            ),
            "audio_vae": AutoencoderKLLTX2Audio(
                base_channels=CHANNELS,
                ch_mult=(1, 1, 1),
                num_res_blocks=1,
                latent_channels=CHANNELS // MEL_LATENTS,
                mel_bins=4 * MEL_LATENTS,
            ),
            "vocoder": _vocoder(),
        }
    for vae in (parts["vae"], parts["audio_vae"]):
        vae.latents_mean.fill_(0.1)
        vae.latents_std.fill_(1.5)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    models = {name: part.eval() for name, part in parts.items()}
    return LTX2Pipeline(tokenizer=cast(Any, tokenizer), scheduler=cast(Any, scheduler), **models)


def _text_encoder(num_tokens: int) -> Gemma3ForConditionalGeneration:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text = {"hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": TEXT_LAYERS, **heads}
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = Gemma3Config(
        text_config=cast(Any, text | {"vocab_size": num_tokens}),
        vision_config=cast(Any, image | {"image_size": 28, "patch_size": 14}),
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


def _connectors() -> LTX2TextConnectors:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": REGISTERS}
    both = {f"{part}_connector_{name}": size for part in ("video", "audio") for name, size in sizes.items()}
    made: LTX2TextConnectors = LTX2TextConnectors(
        caption_channels=TEXT_WIDTH, text_proj_in_factor=TEXT_LAYERS + 1, rope_type="split", **cast(Any, both)
    )
    return made


def _vocoder() -> LTX2Vocoder:
    """Build a vocoder whose sound depends on its input: a fresh one hums the same tone for any input."""
    made: Any = LTX2Vocoder(
        in_channels=2 * 4 * MEL_LATENTS, hidden_channels=32, upsample_kernel_sizes=[16, 15, 8, 4, 4]
    )
    for layer in made.modules():
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.ConvTranspose1d)):
            num_inputs = layer.in_channels * layer.kernel_size[0] / layer.stride[0]
            torch.nn.init.normal_(layer.weight, std=num_inputs**-0.5)
            torch.nn.init.zeros_(cast(torch.Tensor, layer.bias))
    return cast(LTX2Vocoder, made)


def _transformer(layers: int, heads: int) -> LTX2VideoTransformer3DModel:
    made: Any = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=32,
        cross_attention_dim=32 * heads,
        audio_in_channels=CHANNELS,
        audio_out_channels=CHANNELS,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=16 * heads,
        num_layers=layers,
        caption_channels=TEXT_WIDTH,
        rope_type="split",
    )
    tiny.fill_zeros(made)
    return cast(LTX2VideoTransformer3DModel, made)


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "LTX-2")
