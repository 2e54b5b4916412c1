"""Divides prompts between training and validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from omni_async.config import ConfigError
from omni_async.types import Prompt


def question_of(prompt: Prompt) -> tuple[str, ...]:
    """Return the part of a prompt that a model reads: its text, and the digests of its files."""
    return prompt.text, *prompt.digests


def held_out(prompts: Sequence[Prompt], split: int | float) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and those to validate, each in order; every prompt keeps its index.

    Prompts of one text with the same files are on one side. The side depends on texts and files alone, so every attempt
    of a run has the same.

    Args:
        prompts: of one table.
        split: how many prompts to validate: a number, or a share below 1. Copies of the last one are added.

    Raises:
        ConfigError: no prompt is left to train on."""
    wanted = split if isinstance(split, int) else max(1, round(split * len(prompts)))
    copies = Counter(map(question_of, prompts))
    chosen: set[tuple[str, ...]] = set()
    number = 0
    for question in sorted(copies, key=lambda question: blake2b("\0".join(question).encode(), digest_size=16).digest()):
        if number >= wanted:
            break
        chosen.add(question)
        number += copies[question]
    if number == len(prompts):
        raise ConfigError(
            f"validation.split: {split} leaves none of the {len(prompts)} prompts to train on, of which {len(copies)}"
            " differ; lower it"
        )
    training = [prompt for prompt in prompts if question_of(prompt) not in chosen]
    return training, [prompt for prompt in prompts if question_of(prompt) in chosen]


def shared_note(training: Sequence[Prompt], validation: Sequence[Prompt]) -> str | None:
    """Return a warning if prompts of the validation are trained on, with the same files; None if there are none."""
    trained = {*map(question_of, training)}
    shared = [one for one in validation if question_of(one) in trained]
    if not shared:
        return None
    return (
        f"warning: validation.prompts: {len(shared)} of {len(validation)} prompts are in data.prompts too, the first is"
        f" {shared[0].text[:80]!r}; validation.prompts=null validation.split=0.1 holds prompts"
        " out instead"
    )
