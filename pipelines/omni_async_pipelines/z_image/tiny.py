"""Builds a Z-Image checkpoint small enough for tests: real architecture, random weights, offline in seconds.

python -m omni_async_pipelines.z_image.tiny /tmp/tiny_z_image
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from omni_async_pipelines import tiny

_VOCABULARY = 300
# Qwen3's for one message with thinking on, because Qwen3's template then adds no further text.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_components(*, layers: int = 2, heads: int = 4, hidden: int = 64, seed: int = 0) -> ZImagePipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: the transformer's; heads have 16 features.
        hidden: features of the text encoder.
        seed: the same one gives the same weights."""
    # Trained on no prompt: a letter is a token, and captions of a few words are padded to 32 tokens, or to 64.
    tokenizer = tiny.qwen2_tokenizer(["user\n", "assistant\n"], _VOCABULARY)
    tokenizer.chat_template = _CHAT_TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer: Any = ZImageTransformer2DModel(
            in_channels=16,
            dim=16 * heads,
            n_layers=layers,
            n_refiner_layers=1,
            n_heads=heads,
            n_kv_heads=heads,
            cap_feat_dim=hidden,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        )
        tiny.fill_zeros(transformer)
        text_config = Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
        )
        return ZImagePipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny.image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=cast(Any, Qwen3ForCausalLM(text_config).eval()),
            tokenizer=cast(Any, tokenizer),
        )


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Z-Image")
