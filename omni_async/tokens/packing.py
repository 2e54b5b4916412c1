"""Puts prompts with their answers, of different lengths, into rows of bounded length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.tokens.policy import Packed, Prepared


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer (T,) int64, on the CPU."""

    prompt: Prepared
    tokens: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + len(self.tokens)


def cut(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return rows of sequences, by number, of at most `most` tokens; a longer sequence has a row for itself.

    The longest sequences come first, each in the first row with room (first fit, decreasing). Depends on the lengths
    alone."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        fitting = next((row for row, left in enumerate(room) if lengths[number] <= left), None)
        if fitting is None:
            fitting = len(rows)
            rows.append([])
            room.append(most)
        rows[fitting].append(number)
        room[fitting] -= lengths[number]
    return [sorted(row) for row in rows]


def pack(sequences: Sequence[Answered]) -> Packed:
    """Put sequences one behind the other, on the CPU. Media are repeated for every sequence whose prompt has them."""
    ids, places, positions, at = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    start = 0
    for one in sequences:
        prompt, num_tokens = one.prompt, len(one.tokens)
        ids += [prompt.ids, one.tokens]
        places.append(torch.arange(one.length))
        after = prompt.next_position + torch.arange(num_tokens)
        positions += [prompt.positions, after.expand(len(prompt.positions), -1)]
        first = start + len(prompt.ids) - 1  # the prompt's last token predicts the answer's first
        at.append(torch.arange(first, first + num_tokens))
        start += one.length
    return Packed(
        ids=torch.cat(ids),
        places=torch.cat(places),
        positions=torch.cat(positions, dim=1),
        at=torch.cat(at),
        targets=torch.cat([one.tokens for one in sequences]),
        media=joined_media([one.prompt.media for one in sequences]),
    )


def joined_media(media: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the media of prompts in their order. Prompts may have different media."""
    names = sorted({name for one in media for name in one})
    return {name: torch.cat([one[name] for one in media if name in one]) for name in names}
