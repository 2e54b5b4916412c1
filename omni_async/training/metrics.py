"""Collects metrics of one optimizer step.

Recorded row by row together with their reduction, reduced once over rows and ranks.

Recording costs no device synchronisation and no communication. `reduce` is collective. A rank records what it has rows
of: one without any records nothing, and ranks that share a sequence record the same rows, which count once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from omni_async.layout import ParallelLayout
from omni_async.training import TrainingError
from omni_async.training.device import sum_of_rows

Reduction = Literal["mean", "max", "absmax", "variance", "ess"]
_Key: TypeAlias = tuple[str, Reduction]

# What names of the run's own metrics begin with (docs/run-directory.md).
# fmt: off
_OF_THE_RUN = {
    "update", "reward", "staleness", "images", "images_per_s", "update_s", "wall_s", "loss", "grad_norm", "lr",
    "advantage_abs", "log_ratio_nats", "ess", "gamma", "kappa_nats", "row_staleness", "engine_mismatch_nats",
    "fresh_fraction", "weight", "masked", "busy", "buffers", "finished", "conservation",
}
# fmt: on
_NOTHING = torch.empty(0, dtype=torch.float64)


class Metrics:
    """ess: (mean w)^2 / mean w^2 of w = exp(value), in (0, 1], of values of any size.

    Weights are taken relative to the largest of all ranks."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        self._rows: dict[_Key, list[Tensor]] = defaultdict(list)
        self._by_step: dict[_Key, list[tuple[Tensor, list[int]]]] = defaultdict(list)

    def record(self, name: str, values: Tensor | float, reduction: Reduction = "mean") -> None:
        """Record a metric of rows.

        Args:
            name: the one it is reported under.
            values: of any shape; all count alike.
            reduction: that over all values, of this rank and others."""
        self._rows[name, reduction].append(torch.as_tensor(values).detach().reshape(-1))

    def record_by_step(
        self, name: str, values: Tensor, steps: list[int], reduction: Literal["mean", "variance", "ess"]
    ) -> None:
        """Record a metric of rows that is reduced per denoising step.

        Args:
            name: reported as `name/step_03`.
            values: (R,).
            steps: the denoising step of each row, from 0.
            reduction: that over a step's rows, of this rank and others."""
        self._by_step[name, reduction].append((values.detach(), steps))

    def record_loss(self, loss: Tensor, advantage: Tensor, others: dict[str, Tensor]) -> None:
        """Record what an objective computed of R rows.

        Args:
            loss: (R,).
            advantage: (R,), those that the losses were computed with.
            others: the objective's own metrics, names to (R,).

        Raises:
            TrainingError: a metric has the name of one of the run's, which it would hide."""
        if taken := sorted(name for name in others if name.partition("/")[0] in _OF_THE_RUN):
            raise TrainingError(f"the objective's metrics {taken} have names of the run's own; give them others")
        self.record("loss", loss)
        self.record("advantage_abs", advantage.abs())
        for name, values in others.items():
            self.record(name, values)
        if {"clipped_low", "clipped_high"} <= others.keys():
            self.record("clip_fraction", others["clipped_low"] + others["clipped_high"])

    def clear(self) -> None:
        self._rows.clear()
        self._by_step.clear()

    def reduce(self, num_steps: int) -> dict[str, float]:
        """Return all metrics over all ranks, and forget them. `num_steps` is the number of denoising steps N."""
        keys, step_keys = self._recorded()
        several = self._layout.world_size > 1
        columns = {key: _column(self._rows.get(key, ())) for key in keys}
        tables = {key: _by_step(self._by_step.get(key, ())) for key in step_keys}
        tops = [_maximum(columns[key], key[1]).reshape(1) for key in keys]
        tops += [_step_tops(*tables[key], num_steps) for key in step_keys]
        maxima = torch.cat(tops or [torch.zeros(1, dtype=torch.float64)])
        if several:
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        sums = [_moments(columns[key], key[1], maxima[i]).sum(0) for i, key in enumerate(keys)]
        step_tops = maxima[len(keys) :].split(num_steps)
        by_step = [_step_sums(*tables[key], key[1], step_tops[i]) for i, key in enumerate(step_keys)]
        totals = torch.cat([*sums, *(s.reshape(-1) for s in by_step)] or [torch.zeros(1, dtype=torch.float64)])
        totals = sum_of_rows(self._layout, totals)
        rows = totals[: 3 * len(keys)].reshape(-1, 3)
        result = {}
        for i, (name, reduction) in enumerate(keys):
            if reduction in ("max", "absmax"):
                result[name] = float(maxima[i])
            else:
                result[name] = _finish(rows[i], reduction)
        per_step = totals[3 * len(keys) :].reshape(len(by_step), -1, 3) if by_step else ()
        for (name, reduction), table in zip(step_keys, per_step, strict=True):
            fewest = 2 if reduction == "variance" else 1
            result |= {
                f"{name}/step_{i:02d}": _finish(row, reduction) for i, row in enumerate(table) if row[0] >= fewest
            }
        self.clear()
        return result

    def _recorded(self) -> tuple[list[_Key], list[_Key]]:
        """Return what any rank has recorded: of all its rows, and of its rows per denoising step."""
        own = (set(self._rows), set(self._by_step))
        of_ranks = [own] * self._layout.world_size
        if self._layout.world_size > 1:
            dist.all_gather_object(of_ranks, own)
        rows, by_step = (set[_Key]().union(*found) for found in zip(*of_ranks, strict=True))
        return sorted(rows), sorted(by_step)


def _moments(values: Tensor, reduction: Reduction, top: Tensor) -> Tensor:
    """Return (R, 3): 1, and the two numbers whose sums the reduction needs.

    `top` is the largest of all rows that are reduced together, () or (R,)."""
    if reduction == "ess":
        values = (values - top).exp()
    return torch.stack([torch.ones_like(values), values, values.square()], dim=1)


def _column(parts: Iterable[Tensor]) -> Tensor:
    """Return the values of all parts together, (R,) float64 on the CPU."""
    return torch.cat([_NOTHING, *(part.cpu() for part in parts)])


def _by_step(records: Collection[tuple[Tensor, list[int]]]) -> tuple[Tensor, Tensor]:
    """Return the values (R,) float64 and the denoising steps they belong to."""
    values = _column(part for part, _ in records)
    return values, torch.tensor([step for _, steps in records for step in steps], dtype=torch.int64)


def _step_tops(values: Tensor, steps: Tensor, num_steps: int) -> Tensor:
    """Return (num_steps,): the largest of each denoising step's rows, -inf where there is none."""
    return values.new_full((num_steps,), -math.inf).scatter_reduce_(0, steps, values, "amax")


def _step_sums(values: Tensor, steps: Tensor, reduction: Reduction, tops: Tensor) -> Tensor:
    """Return (num_steps, 3): sums of each denoising step's rows.

    `tops` (num_steps,) are their maxima over all ranks."""
    return values.new_zeros(len(tops), 3).index_add_(0, steps, _moments(values, reduction, tops[steps]))


def _maximum(values: Tensor, reduction: Reduction) -> Tensor:
    """Return the maximum () of the values, -inf of none."""
    return (values.abs() if reduction == "absmax" else values).max() if len(values) else values.new_tensor(-math.inf)


def _finish(sums: Tensor, reduction: Reduction) -> float:
    count, total, squares = sums.tolist()
    if reduction == "variance":
        return max(0.0, squares / count - (total / count) ** 2)
    if reduction == "ess":
        return float(total**2 / (count * squares))
    return float(total / count)
