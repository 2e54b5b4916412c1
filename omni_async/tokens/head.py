"""Computes log-probs of tokens from hidden states, without the logits of a whole row.

The logits of 2,048 tokens over 32,768 words take 256 MiB, and their gradient as much again. Chunks of the tokens are
computed one after the other, and once more in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 256  # tokens


def log_probs_of(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int = CHUNK) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature) of the targets, (T,) float32, with gradient.

    The product has the dtype of its factors, as in an engine; everything after it is float32. Call it within the
    forward pass of the module that holds `weight`, where FSDP2 has gathered it.

    Args:
        hidden: (T, H).
        weight: (V, H), the head's.
        targets: (T,) int64.
        temperature: > 0.
        chunk: tokens whose logits are in memory at a time."""
    parts = [
        checkpoint(_chunk, *part, weight, temperature, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def _chunk(hidden: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=1)
