"""Builds a Qwen2.5-Omni checkpoint small enough for tests: real architecture, random weights, built offline in seconds.

It has the thinker and its processor, and neither talker nor vocoder, in transformers' layout. The recipe
`recipes/quickstart/read_digits` trains such a thinker.

    python -m omni_async_pipelines.qwen_omni.tiny /tmp/tiny_qwen_omni
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from omni_async_pipelines import tiny
from omni_async_pipelines.qwen_omni.thinker import Thinker

T = TypeVar("T", bound=torch.nn.Module)

CONTEXT = 1024
PATCH, MERGE = 14, 2
_SIDE = PATCH * MERGE  # pixels of an image's token
_HEAD = 32  # features of an attention head
MEL_BINS = 128
_NAMED_TOKENS = {
    **{"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>"},
    **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
    **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
}
# As the published template, without its default system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROLES = ("system\nuser\nassistant\n",)


def build_processor(
    corpus: Iterable[str] = tiny.CORPUS, *, vocab_size: int = 512, most_pixels: int = 16 * _SIDE**2, **images: Any
) -> Qwen2_5OmniProcessor:
    """Build the processor, with a tokenizer trained on the corpus.

    Args:
        corpus: the texts whose words become single tokens, if `vocab_size` allows.
        vocab_size: the most tokens that the tokenizer may have.
        most_pixels: larger images are reduced to so many pixels.
        images: further settings of the image processor."""
    parts = processor_parts(_NAMED_TOKENS, corpus, vocab_size, _SIDE, most_pixels, images)
    return Qwen2_5OmniProcessor(**parts, chat_template=CHAT_TEMPLATE)


def processor_parts(
    named: Mapping[str, str],
    corpus: Iterable[str],
    vocab_size: int,
    side: int,
    most_pixels: int,
    images: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the parts of a processor.

    Args:
        named: the special tokens of media, by the tokenizer's name for them.
        corpus, vocab_size, most_pixels, images: as for `build_processor`.
        side: pixels of an image's token."""
    size = {"shortest_edge": side**2, "longest_edge": most_pixels}
    return {
        "image_processor": Qwen2VLImageProcessor(size=size, **images),
        "video_processor": Qwen2VLVideoProcessor(size=size, patch_size=side // MERGE),
        "feature_extractor": WhisperFeatureExtractor(feature_size=MEL_BINS),
        "tokenizer": tiny.qwen2_tokenizer([*_ROLES, *corpus], vocab_size, **named),
    }


def build_thinker(tokenizer: Qwen2Tokenizer, *, layers: int = 2, heads: int = 2, seed: int = 0) -> Thinker:
    """Build a thinker with random float32 weights, the same for the same seed.

    Args:
        tokenizer: has the special tokens that the model knows by id.
        layers: of the language model; the tower of images has two.
        heads: of 32 features each, in both; keys and values have one head.
        seed: of the weights."""

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]  # one token, one id

    hidden, end = heads * _HEAD, token_id("<|im_end|>")
    text_config = {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 1},
        **{"intermediate_size": 2 * hidden, "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT},
        **{"eos_token_id": end, "pad_token_id": token_id(tiny.QWEN_PADDING), "tie_word_embeddings": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    }
    vision_config = {
        **{"depth": 2, "hidden_size": hidden, "num_heads": heads, "out_hidden_size": hidden},
        **{"intermediate_size": 2 * hidden, "fullatt_block_indexes": [1], "patch_size": PATCH},
        **{"spatial_merge_size": MERGE, "window_size": 4 * PATCH},
    }
    audio_config = {
        **{"num_mel_bins": MEL_BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
        **{"d_model": 32, "output_dim": hidden},
    }
    # transformers keeps further keys, and its model reads these.
    vision_tokens: Any = {
        f"vision_{a}_token_id": token_id(f"<|vision_{b}|>") for a, b in (("start", "bos"), ("end", "eos"))
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config=text_config,
        vision_config=vision_config,
        audio_config=audio_config,
        image_token_index=token_id("<|IMAGE|>"),
        audio_token_index=token_id("<|AUDIO|>"),
        video_token_index=token_id("<|VIDEO|>"),
        audio_start_token_id=token_id("<|audio_bos|>"),
        audio_end_token_id=token_id("<|audio_eos|>"),
        **vision_tokens,
    )
    return with_random_weights(Thinker, config, seed)


def with_random_weights(cls: Callable[[Any], T], config: Any, seed: int) -> T:
    """Return a float32 model in eval mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        thinker = cls(config)
        for name, weight in thinker.named_parameters():
            if weight.ndim > 1:  # transformers' 0.02 is for wide models; this one would learn nothing for a long time
                inputs = weight.shape[-1] if ".experts." in name else weight[0].numel()
                std = 1.0 if "embed_tokens" in name else inputs**-0.5
                torch.nn.init.normal_(weight, std=std)
    thinker.train(False)
    return thinker


def save(thinker: Thinker, processor: Qwen2_5OmniProcessor, path: Path) -> None:
    """Write a checkpoint that transformers, vLLM and this family load."""
    path.mkdir(parents=True, exist_ok=True)
    config = Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    config.architectures, config.dtype = ["Qwen2_5OmniForConditionalGeneration"], thinker.dtype
    config.save_pretrained(path)
    weights = {f"thinker.{name}": weight.contiguous() for name, weight in thinker.state_dict().items()}
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
    tiny.main(build, "Qwen2.5-Omni")
