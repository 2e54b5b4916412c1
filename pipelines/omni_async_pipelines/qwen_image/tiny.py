"""Builds a Qwen-Image checkpoint small enough for tests: real architecture, random weights, built offline in seconds.

The parts are as in the real model (Qwen2.5-VL text encoder, Qwen-Image VAE and DiT, flow-match Euler scheduler), only
narrower, so that diffusers' ``QwenImagePipeline`` and vLLM-Omni's load the result like any other checkpoint. The
quickstart (``recipes/quickstart/build_checkpoint.py``) starts from the same parts and trains two of them.

    python -m omni_async_pipelines.qwen_image.tiny /tmp/tiny_qwen_image
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from omni_async_pipelines import tiny
from omni_async_pipelines.qwen_image.policy import PATCH
from omni_async_pipelines.qwen_image.sampling import NUM_TEMPLATE_TOKENS, PROMPT_TEMPLATE

# The policy drops the prefix's tokens, so a tokenizer is right only if the prefix takes exactly that many tokens.
PROMPT_PREFIX, PROMPT_SUFFIX = PROMPT_TEMPLATE.split("{}")

LATENT_CHANNELS = 16

_SAMPLE_CORPUS = tiny.CORPUS[:2]


def build_tokenizer(vocab_size: int = 768, corpus: Iterable[str] = _SAMPLE_CORPUS) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer on the prompt template and on ``corpus``.

    Every word of the corpus becomes one token if ``vocab_size`` allows, which keeps prompts short for the DiT.

    Raises:
        ValueError: if ``vocab_size`` is too small for the template's prefix to take 34 tokens."""
    tokenizer = tiny.qwen2_tokenizer([PROMPT_PREFIX, PROMPT_SUFFIX, *corpus], vocab_size)
    num_prefix_tokens = len(tokenizer(PROMPT_PREFIX)["input_ids"])
    if num_prefix_tokens != NUM_TEMPLATE_TOKENS:
        raise ValueError(
            f"the prompt template's prefix takes {num_prefix_tokens} tokens, Qwen-Image drops exactly "
            f"{NUM_TEMPLATE_TOKENS}: raise vocab_size (now {vocab_size})"
        )
    return tokenizer


def build_text_encoder(
    tokenizer: Qwen2Tokenizer, *, vocab_size: int = 768, hidden: int = 64, init_std: float = 0.2
) -> Qwen2_5_VLForConditionalGeneration:
    """Build a random Qwen2.5-VL of two layers.

    Weights are drawn from torch's global generator.

    Args:
        tokenizer: has the special tokens that the model knows by id.
        vocab_size: the number of embeddings, at least the number of the tokenizer's tokens.
        hidden: features, a multiple of 16.
        init_std: standard deviation of the weights."""
    half_head_dim = hidden // 4
    sections = [half_head_dim // 2, half_head_dim // 4, half_head_dim - half_head_dim // 2 - half_head_dim // 4]

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]  # one token, one id

    text_config = {
        **{"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"intermediate_size": 2 * hidden, "vocab_size": vocab_size, "max_position_embeddings": 4096},
        **{"bos_token_id": token_id(tiny.QWEN_PADDING), "eos_token_id": token_id("<|im_end|>")},
        "initializer_range": init_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    }
    vision_config = {
        **{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": hidden, "intermediate_size": 32},
        **{"fullatt_block_indexes": [0], "window_size": 112, "hidden_act": "silu"},
    }
    config = Qwen2_5_VLConfig(
        tie_word_embeddings=True,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        text_config=text_config,
        vision_config=vision_config,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build Qwen-Image's scheduler, with the values of the published checkpoint."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def build_components(
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    head_dim: int = 24,
    vae_base_dim: int = 8,
    vae_dim_mult: Sequence[int] = (1, 2, 2, 2),
    vocab_size: int = 768,
    corpus: Iterable[str] = _SAMPLE_CORPUS,
    seed: int = 0,
) -> QwenImagePipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    The same seed gives the same weights.

    Args:
        hidden: features of the text encoder, a multiple of 16.
        layers, heads, head_dim: shape of the DiT; ``head_dim`` a multiple of 4.
        vae_base_dim, vae_dim_mult: channels of the VAE, which always downsamples 8 times to 16 latent channels.
        vocab_size, corpus: see ``build_tokenizer``."""
    if head_dim % 4 or head_dim < 8:
        raise ValueError(f"head_dim must be a multiple of 4 and at least 8 (rotary axes are even), got {head_dim}")
    if hidden % 16:
        raise ValueError(f"hidden must be a multiple of 16 (two heads, three rotary sections), got {hidden}")
    tokenizer = build_tokenizer(vocab_size, corpus)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = build_text_encoder(tokenizer, vocab_size=vocab_size, hidden=hidden)
        spatial_rope_dim = (head_dim - 4) // 2
        transformer = QwenImageTransformer2DModel(
            patch_size=PATCH,
            in_channels=LATENT_CHANNELS * PATCH**2,
            out_channels=LATENT_CHANNELS,
            num_layers=layers,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            joint_attention_dim=hidden,
            axes_dims_rope=(4, spatial_rope_dim, spatial_rope_dim),
        )
        vae = AutoencoderKLQwenImage(
            base_dim=vae_base_dim,
            z_dim=LATENT_CHANNELS,
            dim_mult=list(vae_dim_mult),
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
    return QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=cast(Any, vae).eval(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=cast(Any, transformer).eval(),
    )


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Qwen-Image")
