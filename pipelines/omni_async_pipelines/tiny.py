"""Contains the code shared by the families' builders of tiny checkpoints.

It trains tokenizers of a few hundred tokens on a handful of prompts, without a hub, writes checkpoints, and parses the
command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AutoencoderKL
from diffusers.utils import logging as diffusers_logging
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTokenizer, GemmaTokenizer, Qwen2Tokenizer, T5Tokenizer
from transformers.utils import logging as transformers_logging

CORPUS = ("the digit 7", "a photo of a red circle on a white background", "a blue square moves to the right")
QWEN_PADDING = "<|endoftext|>"
_CLIP_TOKENS = 77
_T5_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"-()"

_QWEN_NAMES = ("im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
_QWEN_SPECIAL_TOKENS = (QWEN_PADDING, *(f"<|{name}|>" for name in _QWEN_NAMES))
# Qwen2Tokenizer splits by this pattern after every load; merges learnt with another one could never apply.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fill_zeros(model: Any) -> None:
    """Draw parameters that are all zero from torch's generator, because with them a model would ignore its input."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)


def train_bpe(texts: Iterable[str], vocab_size: int, split: Any, **suffix: str) -> tuple[dict[str, int], Any]:
    """Train a byte-level BPE.

    Args:
        texts: the training texts.
        vocab_size: the most tokens that it may have.
        split: the pre-tokenizer that splits a text into words.
        suffix: `end_of_word_suffix`, if words end in one.

    Returns:
        The vocabulary, tokens to ids, and the merges, pairs of tokens."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(models.BPE(**suffix))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
        **suffix,
    )
    bpe.train_from_iterator([*texts] * 2, trainer)  # twice, so that every word is frequent enough to be merged
    trained = _trained_model(bpe)
    return trained["vocab"], [tuple(merge) for merge in trained["merges"]]


def clip_tokenizer() -> CLIPTokenizer:
    """Train a byte-level BPE tokenizer with CLIP's word suffix.

    Its last two tokens begin and end a text, as in the published tokenizers, because pooling looks for the largest
    id."""
    vocab, merges = train_bpe(CORPUS, 700, pre_tokenizers.WhitespaceSplit(), end_of_word_suffix="</w>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for token in (*(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"):
        vocab.setdefault(token, len(vocab))
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=_CLIP_TOKENS)


def qwen2_tokenizer(texts: Iterable[str], vocab_size: int, **named: str) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer of Qwen's, which has at most `vocab_size` tokens.

    In the training texts its special tokens only separate words. `named`: further special tokens by the tokenizer's
    attribute, such as `image_token`."""
    plain = list(texts)
    for special in (*_QWEN_SPECIAL_TOKENS, *named.values()):
        plain = [text.replace(special, "\n") for text in plain]
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
    vocab, merges = train_bpe(plain, vocab_size - len(_QWEN_SPECIAL_TOKENS) - len(named), split)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=QWEN_PADDING,
        eos_token="<|im_end|>",
        pad_token=QWEN_PADDING,
        extra_special_tokens=list(_QWEN_SPECIAL_TOKENS[1:]),
        model_max_length=4096,
        **named,
    )


def t5_tokenizer(texts: Iterable[str] = CORPUS) -> T5Tokenizer:
    """Train a Unigram tokenizer on the texts, for T5 and UMT5."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=sorted(_T5_LETTERS),
        show_progress=False,
    )
    unigram.train_from_iterator([*texts] * 4, trainer)
    pieces = [(piece, score) for piece, score in _trained_model(unigram)["vocab"]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=512)


def gemma_tokenizer() -> GemmaTokenizer:
    """Train a BPE over characters, with bytes for unseen characters."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(
        [*CORPUS] * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    trained = _trained_model(bpe)
    merges = [tuple(merge) for merge in trained["merges"]]
    return GemmaTokenizer(vocab=trained["vocab"], merges=cast(Any, merges), model_max_length=1024)


def _trained_model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def t5_sizes(tokenizer: Sized, width: int) -> dict[str, Any]:
    """Return the arguments of a small `T5Config` or `UMT5Config` of `width` features."""
    sizes = {"vocab_size": len(tokenizer) + 4, "d_model": width, "d_kv": 16, "d_ff": 64}
    return sizes | {"num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}


def clip_encoder(cls: Any, tokenizer: CLIPTokenizer, width: int) -> Any:
    """Build one of transformers' CLIP text encoders with random weights, of `width` features and as many pooled."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return cls(config).eval()


def image_vae(scaling_factor: float, shift_factor: float) -> Any:
    """Build an `AutoencoderKL` with random weights, 16 latent channels, and each latent 8 x 8 pixels."""
    blocks = 4
    vae: Any = AutoencoderKL(
        latent_channels=16,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )
    return vae.eval()


def build(make: Callable[..., Any], path: str | Path, *, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """Write a pipeline in diffusers' layout and return its folder.

    Args:
        make: builds the pipeline, in float32.
        path: the folder to write.
        dtype: of the weights written.
        shape: the arguments of `make`."""
    pipeline = make(**shape)
    if dtype != torch.float32:
        pipeline.to(dtype)
    pipeline.save_pretrained(path)
    return Path(path)


def main(build: Callable[..., Path], model: str, **flags: str) -> None:
    """Run the command line of a builder.

    Args:
        build: builds the checkpoint, given a folder, a seed and the flags.
        model: its name in the help.
        flags: further switches, each with its help."""
    parser = argparse.ArgumentParser(description=f"Write a tiny random {model} checkpoint.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    for flag, what in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=what)
    options = vars(parser.parse_args())
    diffusers_logging.set_verbosity_error()  # warns of casts that change nothing
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    out = build(options.pop("out"), **options)
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    sys.stdout.write(f"{out}: {num_bytes / 1e6:.1f} MB\n")
