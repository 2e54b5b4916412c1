"""Builds a HunyuanVideo-1.5 checkpoint small enough for tests: real architecture, random weights, offline in seconds.

python -m omni_async_pipelines.hunyuan_video_15.tiny /tmp/tiny_hunyuan_video_15
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from omni_async_pipelines import tiny

TEXT_WIDTH, GLYPH_WIDTH = 64, 32
CHANNELS = 8
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_components(*, layers: int = 2, heads: int = 2, seed: int = 0) -> HunyuanVideo15Pipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: the transformer's; heads have 16 features.
        seed: the same one gives the same weights."""
    bytes_tokenizer = ByT5Tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer: Any = HunyuanVideo15Transformer3DModel(
            in_channels=2 * CHANNELS + 1,
            out_channels=CHANNELS,
            num_attention_heads=heads,
            attention_head_dim=16,
            num_layers=layers,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=GLYPH_WIDTH,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            task_type="t2v",
        )
        tiny.fill_zeros(transformer)
        tokenizer, text_encoder = _text_encoder()
        vae: Any = AutoencoderKLHunyuanVideo15(
            latent_channels=CHANNELS, block_out_channels=(2 * CHANNELS,) * 5, layers_per_block=1
        )
        glyph_encoder = T5EncoderModel(T5Config(**tiny.t5_sizes(bytes_tokenizer, GLYPH_WIDTH)))
    return HunyuanVideo15Pipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        tokenizer_2=bytes_tokenizer,
        text_encoder_2=cast(Any, glyph_encoder).eval(),
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=cast(Any, FlowMatchEulerDiscreteScheduler(shift=5.0)),
        guider=cast(Any, ClassifierFreeGuidance(guidance_scale=6.0)),
    )


def _text_encoder() -> tuple[Qwen2Tokenizer, Any]:
    """Build a tokenizer that knows the words of the pipeline's system message, and a model of three layers for it.

    ValueError if that message is not as many tokens as the pipeline drops."""
    encode = signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    system, dropped = encode["system_message"].default, encode["crop_start"].default
    tokenizer = tiny.qwen2_tokenizer([system, "system\nuser\nassistant\n", *tiny.CORPUS], 768)
    tokenizer.chat_template = _CHAT
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    if len(tokenizer(prefix)["input_ids"]) != dropped:
        raise ValueError(f"the system message must be {dropped} tokens, which the pipeline drops")
    config = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_WIDTH,
        num_hidden_layers=3,  # the last two are not read
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]},
    )
    model: Any = Qwen2_5_VLTextModel(config)
    return tokenizer, model.eval()


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "HunyuanVideo-1.5")
