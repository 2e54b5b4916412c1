"""Collects metrics of one optimizer step.

Metrics are recorded row by row with their reduction, and reduced once over rows and ranks.

Recording needs no device synchronisation and no communication. `reduce` is collective. A rank records only its own
rows; a rank without rows records nothing. Ranks that share a sequence record the same rows, which count once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from omni_async.config.layout import ParallelLayout
from omni_async.training import TrainingError
from omni_async.training.device import send, sum_of_rows

Reduction = Literal["mean", "max", "absmax", "rms", "variance", "ess"]
_Key: TypeAlias = tuple[bool, str, Reduction]  # the first: by step

# Prefixes of the names of the run's own metrics (docs/run-directory.md).
# fmt: off
_OF_THE_RUN = {
    "update", "reward", "staleness", "images", "images_per_s", "update_s", "wall_s", "loss", "grad_norm", "lr",
    "lr_factor", "alignment", "advantage_abs", "log_prob", "log_ratio_nats", "ess", "k3_nats", "chi2",
    "perplexity_ratio", "gamma", "kappa_nats", "statistic", "drift_clipped", "row_staleness",
    "engine_mismatch_nats", "engine_mismatch", "engine_mismatch_velocity", "engine_mismatch_clipped",
    "engine_mismatch_honest", "fresh_fraction", "proximal_ratio", "weight", "masked", "busy", "buffers", "finished",
    "conservation", "admission", "encoder", "prefix", "score_cache", "scorer", "flops", "peak_tflops", "tflops", "mfu",
    "stage_s", "device", "answer_tokens", "answer_versions", "tokens_per_s", "overlong", "entropy",
}
# fmt: on
_OfSamples: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_NOTHING = torch.empty(0, dtype=torch.float64)


class Metrics:
    """The metrics of one rank.

    ess: (mean w)^2 / mean w^2 of w = exp(value), in (0, 1]. Weights are computed relative to the largest of all ranks,
    so values may have any size."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        # Values, and the denoising step of each; a metric that is not reduced by step has step 0 for all rows.
        self._rows: dict[_Key, list[tuple[Tensor, list[int]]]] = defaultdict(list)
        self._samples: dict[str, list[tuple[Tensor, Sequence[Hashable], _OfSamples]]] = defaultdict(list)

    def record(self, name: str, values: Tensor | float, reduction: Reduction = "mean") -> None:
        """Record a metric of rows.

        Args:
            name: its name in reports.
            values: of any shape; all count alike.
            reduction: the reduction over all values of all ranks."""
        flat = torch.as_tensor(values).detach().reshape(-1)
        self._rows[False, name, reduction].append((flat, [0] * len(flat)))

    def record_by_step(
        self, name: str, values: Tensor, steps: list[int], reduction: Literal["mean", "variance", "ess"]
    ) -> None:
        """Record a metric of rows that is reduced per denoising step.

        Args:
            name: reported as `name/step_03`.
            values: (R,).
            steps: the denoising step of each row, from 0.
            reduction: the reduction over a step's rows of all ranks."""
        self._rows[True, name, reduction].append((values.detach(), steps))

    def record_by_sample(self, name: str, values: Tensor, samples: Sequence[Hashable], function: _OfSamples) -> None:
        """Record a metric of samples: the mean over all samples of a function of each sample's rows.

        The rows of a sample may be recorded in several calls before `reduce`, all on one rank.

        Args:
            name: its name in reports; with the same `function` in every call.
            values: (R,).
            samples: the sample of each row.
            function: returns (n,) values of n samples from the mean over each sample's rows and their number, both (n,)
                float64 on the device of the rows, without waiting for it."""
        self._samples[name].append((values.detach(), samples, function))

    def record_loss(self, loss: Tensor, advantage: Tensor, others: dict[str, Tensor]) -> None:
        """Record an objective's loss and metrics of R rows.

        Args:
            loss: (R,).
            advantage: (R,), the advantages in the losses.
            others: the objective's own metrics, names to (R,).

        Raises:
            TrainingError: a metric has the name of a metric of the run, and would hide it."""
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
        self._samples.clear()

    def reduce(self, num_steps: int) -> dict[str, float]:
        """Return all metrics over all ranks, and clear them. `num_steps` is the number of denoising steps N."""
        self._reduce_samples()
        keys = self._recorded()
        if not keys:
            return {}
        tables = _tables([self._rows.get(key, []) for key in keys])
        self.clear()
        sizes = [num_steps if by_step else 1 for by_step, _, _ in keys]
        tops = torch.cat([_tops(*table, key[2], n) for key, table, n in zip(keys, tables, sizes, strict=True)])
        if self._layout.world_size > 1:
            dist.all_reduce(tops, dist.ReduceOp.MAX)
        per_key = tops.split(sizes)
        sums = [_sums(*table, key[2], top) for key, table, top in zip(keys, tables, per_key, strict=True)]
        totals = sum_of_rows(self._layout, torch.cat(sums)).split(sizes)
        result = {}
        for (by_step, name, reduction), rows, top in zip(keys, totals, per_key, strict=True):
            fewest = 2 if by_step and reduction == "variance" else 1
            for step, row in enumerate(rows):
                if row[0] >= fewest:
                    result[f"{name}/step_{step:02d}" if by_step else name] = _reduced(row, reduction, float(top[step]))
        return result

    def _reduce_samples(self) -> None:
        """Turn the rows of `record_by_sample` into a value of each sample, where the rows are."""
        for name, records in self._samples.items():
            values = torch.cat([values for values, _, _ in records]).double()
            numbers: dict[Hashable, int] = {}
            own = [numbers.setdefault(sample, len(numbers)) for _, samples, _ in records for sample in samples]
            index = send(torch.tensor(own), values.device)
            counts = values.new_zeros(len(numbers)).index_add_(0, index, torch.ones_like(values))
            sums = values.new_zeros(len(numbers)).index_add_(0, index, values)
            self.record(name, records[0][2](sums / counts, counts))
        self._samples.clear()

    def _recorded(self) -> list[_Key]:
        """Return the keys that any rank has recorded."""
        own = set(self._rows)
        of_ranks = [own] * self._layout.world_size
        if self._layout.world_size > 1:
            dist.all_gather_object(of_ranks, own)
        return sorted(set[_Key]().union(*of_ranks))


def _tables(of_keys: Sequence[Sequence[tuple[Tensor, list[int]]]]) -> list[tuple[Tensor, Tensor]]:
    """Return each key's recorded values, (R,) float64 on the CPU, and the denoising step of each value."""
    values = _on_host([values for records in of_keys for values, _ in records])
    tables = []
    for records in of_keys:
        own, values = values[: len(records)], values[len(records) :]
        steps = [step for _, its in records for step in its]
        tables.append((torch.cat([_NOTHING, *own]), torch.tensor(steps, dtype=torch.int64)))
    return tables


def _on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors (n,) on the CPU. Values on a device are copied at once, because each copy waits for the device."""
    away = [one.double() for one in values if one.device.type != "cpu"]
    if not away:
        return [*values]
    fetched = iter(torch.cat(away).cpu().split([len(one) for one in away]))
    return [one if one.device.type == "cpu" else next(fetched) for one in values]


def _tops(values: Tensor, steps: Tensor, reduction: Reduction, num_steps: int) -> Tensor:
    """Return (num_steps,): the largest of each step's rows, -inf for a step without rows."""
    values = values.abs() if reduction == "absmax" else values
    return values.new_full((num_steps,), -math.inf).scatter_reduce_(0, steps, values, "amax")


def _sums(values: Tensor, steps: Tensor, reduction: Reduction, tops: Tensor) -> Tensor:
    """Return (num_steps, 3): each step's number of rows, and the two sums that the reduction needs.

    `tops` (num_steps,) are the largest values over all ranks."""
    if reduction == "ess":
        values = (values - tops[steps]).exp()
    moments = torch.stack([torch.ones_like(values), values, values.square()], dim=1)
    return values.new_zeros(len(tops), 3).index_add_(0, steps, moments)


def _reduced(sums: Tensor, reduction: Reduction, top: float) -> float:
    count, total, squares = sums.tolist()
    if reduction in ("max", "absmax"):
        return top
    if reduction == "variance":
        return max(0.0, squares / count - (total / count) ** 2)
    if reduction == "rms":
        return math.sqrt(squares / count)
    return float(total**2 / (count * squares) if reduction == "ess" else total / count)
