"""Trains tokenizers of a few hundred tokens on a handful of prompts.

They are for tiny checkpoints that are built without a hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

CORPUS = ("the digit 7", "a photo of a red circle on a white background", "a blue square moves to the right")
_CLIP_TOKENS = 77
_T5_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"-()"


def clip_tokenizer(vocab_size: int = 700, corpus: Iterable[str] = CORPUS) -> CLIPTokenizer:
    """Train a byte-level BPE tokenizer with CLIP's word suffix.

    Its last two tokens begin and end a text, as in the published ones, where pooling looks for the largest id."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
    )
    bpe.train_from_iterator([*corpus] * 2, trainer)
    trained = _model(bpe)
    vocab: dict[str, int] = trained["vocab"]
    for token in (*(f"{letter}</w>" for letter in sorted(alphabet)), "<|startoftext|>", "<|endoftext|>"):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in trained["merges"]]
    pairs: Any = merges  # what the tokenizer takes, whatever it declares
    return CLIPTokenizer(vocab=vocab, merges=pairs, model_max_length=_CLIP_TOKENS)


def t5_tokenizer(model_max_length: int = 512, corpus: Iterable[str] = CORPUS) -> T5Tokenizer:
    """Train a Unigram tokenizer, which serves T5 and UMT5."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=sorted(_T5_LETTERS),
        show_progress=False,
    )
    unigram.train_from_iterator([*corpus] * 4, trainer)
    pieces = [(piece, score) for piece, score in _model(unigram)["vocab"]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, additional_special_tokens=[], model_max_length=model_max_length)


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model
