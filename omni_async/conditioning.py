"""Stacks the conditioning of samples to that of a batch, by a rule for every key, which the family states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import TensorDict

Rule = Literal["same", "pad", "jagged"]


def stack_rows(rows: Sequence[TensorDict], rules: Mapping[str, Rule]) -> TensorDict:
    """Stacks conditioning of batch size [] to one of batch size [B]. The rules:

    same    tensors of one shape
    pad     tensors (L, ...) of different lengths L, padded at the end with zeros (False)
    jagged  tensors (L, ...) of different lengths that stay as they are: `stacked.get(key, as_list=True)` lists them

    Raises ValueError for a key without a rule."""
    keys = {str(key) for row in rows for key in row.keys()}  # noqa: SIM118 - a TensorDict iterates over its rows
    if unknown := sorted(keys - rules.keys()):
        raise ValueError(f"conditioning {unknown[0]!r} has no rule to stack it by; there are rules for {sorted(rules)}")
    longest = {key: max(len(row[key]) for row in rows) for key in keys if rules[key] == "pad"}
    padded = [row.copy().update({key: _pad(row[key], length) for key, length in longest.items()}) for row in rows]
    if any(rules[key] == "jagged" for key in keys):
        return TensorDict.lazy_stack(padded)
    stacked: TensorDict = torch.stack(padded)  # type: ignore[arg-type, assignment]
    return stacked


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])
