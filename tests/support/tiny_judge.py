"""Builds a random vision-language model of half a million parameters, which a vLLM server can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WIDTH, _VOCABULARY = 64, 512
PROMPT = "Does this image show it? Answer with yes or no."
_CORPUS = ("a photo of a red circle on a white background", PROMPT, "yes", "no") * 20


def build(folder: Path) -> Path:
    """Writes the checkpoint, a Qwen3-VL with two layers, and its processor."""
    from omni_async_pipelines import tiny  # first: it prepares the imports of a mixed installation

    import torch  # isort: skip
    import transformers as tf  # isort: skip

    tokenizer = tiny.qwen2_tokenizer(_CORPUS, _VOCABULARY)
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        )
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "out_hidden_size": _WIDTH,
        "intermediate_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(0)
    config = tf.Qwen3VLConfig(**ids, tie_word_embeddings=False, text_config=text, vision_config=vision)
    model = tf.Qwen3VLForConditionalGeneration(config)
    _say_yes_or_no(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(folder)
    size = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64}
    images = tf.Qwen2VLImageProcessor(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    videos = tf.Qwen3VLVideoProcessor(size=size)
    tf.Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return folder


def _say_yes_or_no(model: Any, tokenizer: Any) -> None:
    """Makes the model's answers begin with yes or no, as likely as the image says: no other token has a logit."""
    import torch

    with torch.no_grad():
        asked = tokenizer(f"{PROMPT}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt").input_ids
        hidden = model.model(input_ids=asked).last_hidden_state[0, -1]
        weight = model.lm_head.weight
        own = weight.clone()
        weight.zero_()
        for word in ("yes", "no"):
            (token,) = tokenizer(word).input_ids
            weight[token] = 20 * hidden / hidden.norm() ** 2 + 20 * own[token]
