"""Computes the probability that a text recogniser gives to a given text: the CTC forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def text_probability(frames: np.ndarray, text: Sequence[Sequence[int]], silent: Sequence[int]) -> float:
    """Return the per-character geometric mean of P(text | frames), in [0, 1]; 0 if the text does not fit in.

    `frames` (T, C): probabilities over the alphabet, rows summing to 1. `text`: for each character, the alphabet
    entries that count as it (both cases, say). `silent`: entries that write nothing, the CTC blank among them.

    Source: Graves et al. 2006, section 4.1, eqs. 5-8 (alpha recursion), over the text with a blank before, between and
    after."""
    if not text:
        raise ValueError("the probability of an empty text is not defined")
    blank = frames[:, list(silent)].sum(axis=1, dtype=np.float64)
    columns = [blank]
    for character in text:
        columns += [frames[:, list(character)].sum(axis=1, dtype=np.float64), blank]
    emit = np.stack(columns, axis=1).clip(max=1.0)

    num_states = emit.shape[1]
    skip = np.zeros(num_states, dtype=bool)  # a character may follow another one without a blank if they differ
    for i in range(1, len(text)):
        skip[2 * i + 1] = list(text[i]) != list(text[i - 1])
    alpha = np.zeros(num_states)
    alpha[:2] = emit[0, :2]
    for row in emit[1:]:
        arrive = alpha.copy()
        arrive[1:] += alpha[:-1]
        arrive[2:] += np.where(skip[2:], alpha[:-2], 0.0)
        alpha = arrive * row
    total = float(alpha[-1] + alpha[-2])
    return min(1.0, total) ** (1.0 / len(text))
