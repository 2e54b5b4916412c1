"""Builds a Qwen3-Omni checkpoint small enough for tests: real architecture, random weights, built offline in seconds.

It has the thinker and its processor, and neither talker nor vocoder, in transformers' layout.

    python -m omni_async_pipelines.qwen3_omni.tiny /tmp/tiny_qwen3_omni
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen3OmniMoeConfig, Qwen3OmniMoeProcessor, Qwen3OmniMoeThinkerConfig

from omni_async.weights.experts import checkpoint_parts
from omni_async_pipelines import tiny
from omni_async_pipelines.qwen3_omni import FAMILY
from omni_async_pipelines.qwen3_omni.thinker import Thinker
from omni_async_pipelines.qwen_omni.tiny import (
    CHAT_TEMPLATE,
    CONTEXT,
    MEL_BINS,
    processor_parts,
    with_random_weights,
)

PATCH, MERGE = 16, 2
_HEAD = 32  # features of an attention head
_NAMED_TOKENS = {
    **{"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>"},
    **{"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    **{"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
}


def build_processor(*, vocab_size: int = 512) -> Qwen3OmniMoeProcessor:
    """Build the processor, with a tokenizer of at most `vocab_size` tokens."""
    side = PATCH * MERGE
    parts = processor_parts(_NAMED_TOKENS, tiny.CORPUS, vocab_size, side, 16 * side**2, {"patch_size": PATCH})
    template = CHAT_TEMPLATE.replace("_bos|>", "_start|>").replace("_eos|>", "_end|>")
    for part in ("image", "video", "audio"):
        template = template.replace(f"<|{part.upper()}|>", _NAMED_TOKENS[f"{part}_token"])
    return Qwen3OmniMoeProcessor(**parts, chat_template=template)


def build_thinker(
    tokenizer: Qwen2Tokenizer, *, layers: int = 2, heads: int = 2, experts: int = 4, seed: int = 0
) -> Thinker:
    """Build a thinker with random float32 weights, the same for the same seed.

    Args:
        tokenizer: has the special tokens that the model knows by id.
        layers: of the language model; the tower of images has three, and one also feeds the first layer.
        heads: of 32 features each, in both; keys and values have one head.
        experts: of a layer; a token takes two.
        seed: of the weights."""

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]  # one token, one id

    hidden = heads * _HEAD
    text_config = {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 1},
        **{"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "head_dim": _HEAD},
        **{"intermediate_size": hidden, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT},
        **{"eos_token_id": token_id("<|im_end|>"), "pad_token_id": token_id(tiny.QWEN_PADDING)},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
            "mrope_interleaved": True,
        },
    }
    vision_config = {
        **{"depth": 3, "hidden_size": hidden, "num_heads": heads, "out_hidden_size": hidden},
        **{"intermediate_size": 2 * hidden, "patch_size": PATCH, "spatial_merge_size": MERGE},
        **{"num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    }
    audio_config = {
        **{"num_mel_bins": MEL_BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
        **{"d_model": 32, "output_dim": hidden, "downsample_hidden_size": 8},
    }
    # transformers keeps further keys, and its model reads these.
    vision_tokens: Any = {f"vision_{end}_token_id": token_id(f"<|vision_{end}|>") for end in ("start", "end")}
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text_config,
        vision_config=vision_config,
        audio_config=audio_config,
        image_token_id=token_id("<|image_pad|>"),
        audio_token_id=token_id("<|audio_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        audio_start_token_id=token_id("<|audio_start|>"),
        **vision_tokens,
    )
    return with_random_weights(Thinker, config, seed)


def save(thinker: Thinker, processor: Qwen3OmniMoeProcessor, path: Path) -> None:
    """Write a checkpoint that transformers, vLLM and this family load."""
    path.mkdir(parents=True, exist_ok=True)
    config = Qwen3OmniMoeConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    config.architectures, config.dtype = [FAMILY.model_index_class], thinker.dtype
    config.save_pretrained(path)
    weights = {
        part: weight[at].clone()
        for name, weight in thinker.state_dict().items()
        for part, at in checkpoint_parts(f"thinker.{name}", weight.shape, FAMILY.fused)
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    processor.save_pretrained(path)


def build(path: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> Path:
    """Write a checkpoint with random weights and return its folder.

    Args:
        path: the folder to write.
        dtype: of the weights written.
        seed: of the weights.
        sizes: as `build_thinker` takes them."""
    processor = build_processor()
    thinker = build_thinker(processor.tokenizer, seed=seed, **sizes)
    torch.nn.Module.to(thinker, dtype)
    save(thinker, processor, Path(path))
    return Path(path)


if __name__ == "__main__":
    tiny.main(build, "Qwen3-Omni")
