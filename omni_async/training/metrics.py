"""Metrics of one optimizer step: recorded row by row together with their reduction, reduced once over rows and ranks.

Recording costs no device synchronisation and no communication. `reduce` is collective: every rank must have recorded the same names.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["mean", "max", "absmax", "variance", "ess", "last"]

_MAX_EXPONENT = 300.0


class Metrics:
    """ess: (mean w)^2 / mean w^2 of w = exp(value), in (0, 1]. last: the last value recorded on this rank."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Reduction], list[Tensor]] = defaultdict(list)
        self._by_step: dict[str, list[tuple[Tensor, list[int]]]] = defaultdict(list)

    def record(self, name: str, values: Tensor | float, reduction: Reduction = "mean") -> None:
        self._rows[name, reduction].append(torch.as_tensor(values).detach().reshape(-1))

    def record_by_step(self, name: str, values: Tensor, steps: list[int]) -> None:
        """Variance of `values` (R,) per denoising step, reported as `name/step_03`."""
        self._by_step[name].append((values.detach(), steps))

    def clear(self) -> None:
        self._rows.clear()
        self._by_step.clear()

    def reduce(self, num_steps: int) -> dict[str, float]:
        """All metrics over all ranks, and forgets them. `num_steps` is the number of denoising steps N."""
        keys = sorted(self._rows)
        columns = {key: torch.cat([v.cpu() for v in self._rows[key]]).to(torch.float64) for key in keys}
        sums = [_sums(columns[key], key[1]) for key in keys]
        by_step = [_step_sums(self._by_step[name], num_steps) for name in sorted(self._by_step)]
        maxima = torch.stack([_maximum(columns[key], key[1]) for key in keys] or [torch.zeros((), dtype=torch.float64)])
        totals = torch.cat([*sums, *(s.reshape(-1) for s in by_step)] or [torch.zeros(1, dtype=torch.float64)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals, dist.ReduceOp.SUM)
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        rows = totals[: 3 * len(keys)].reshape(-1, 3)
        result = {name: _finish(rows[i], maxima[i], columns[name, reduction], reduction) for i, (name, reduction) in enumerate(keys)}
        per_step = totals[3 * len(keys) :].reshape(len(by_step), -1, 3) if by_step else ()
        for name, table in zip(sorted(self._by_step), per_step, strict=True):
            result |= {f"{name}/step_{i:02d}": _variance(row) for i, row in enumerate(table) if row[0] > 1}
        self.clear()
        return result


def _sums(values: Tensor, reduction: Reduction) -> Tensor:
    """(3,): the count, and the two sums the reduction needs."""
    if reduction == "ess":
        weights = values.clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()
        return torch.stack([values.new_tensor(len(values)), weights.sum(), weights.square().sum()])
    return torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])


def _step_sums(records: list[tuple[Tensor, list[int]]], num_steps: int) -> Tensor:
    """(num_steps, 3): `_sums` of each denoising step's rows."""
    values = torch.cat([v.cpu() for v, _ in records]).to(torch.float64)
    steps = torch.tensor([step for _, steps in records for step in steps])
    moments = torch.stack([torch.ones_like(values), values, values.square()], dim=1)
    return values.new_zeros(num_steps, 3).index_add_(0, steps, moments)


def _maximum(values: Tensor, reduction: Reduction) -> Tensor:
    return (values.abs() if reduction == "absmax" else values).max()


def _variance(sums: Tensor) -> float:
    count, total, squares = sums.tolist()
    return max(0.0, squares / count - (total / count) ** 2)


def _finish(sums: Tensor, maximum: Tensor, values: Tensor, reduction: Reduction) -> float:
    count, total, squares = sums.tolist()
    if reduction in ("max", "absmax"):
        return float(maximum)
    if reduction == "last":
        return float(values[-1])
    if reduction == "variance":
        return _variance(sums)
    if reduction == "ess":
        return float(total**2 / (count * squares))
    return float(total / count)
