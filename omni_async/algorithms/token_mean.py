"""Counts the answers, or tokens, that `algorithm.answers.mean` averages over, when some of them are masked."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.correction import Corrected, normaliser
from omni_async.config.algorithm import Answers, Correction


def counted(
    settings: Answers,
    correction: Correction,
    lengths: Tensor,
    most_tokens: Tensor,
    corrected: Corrected | None = None,
    trained: Tensor | None = None,
) -> tuple[float, float]:
    """Return what the mean divides by, before and after the correction; sums over answers, so micro-batches add up.

    Before it are all tokens for mean `token`, else all answers. A token that the correction masks takes its part away:
    1, or 1 / T of its answer of T tokens for mean `sequence`, or 1 / most_tokens for mean `constant`. With normalised
    weights every token counts as its weight.

    Args:
        settings: `algorithm.answers`.
        correction: `algorithm.correction`.
        lengths: (N,) int64, the tokens of each answer.
        most_tokens: (N,) int64, the largest number of tokens that each answer could have.
        corrected: the correction of these answers, padded to (N, W); None: there is none.
        trained: (N,) bool, False for answers that do not count at all; None: all count."""
    mean = settings.mean
    divisors = {"sequence": lengths, "token": torch.ones_like(lengths), "constant": most_tokens}
    share = 1.0 / divisors[mean].double()
    counts = torch.ones_like(lengths, dtype=torch.float64) if trained is None else trained.double()
    before = ((lengths * counts) if mean == "token" else counts).sum().item()
    if corrected is None:
        return before, before
    of_tokens = (share * counts)[:, None].expand_as(corrected.weight)
    every, left = normaliser(corrected, correction, of_tokens)
    return before, before + left - every
