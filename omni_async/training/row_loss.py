"""What the engine of a rank needs of a kind of loss: rows in micro-batches, their losses, and the end of steps and
updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from omni_async.training.groups import GroupBatch
from omni_async.types import SampleDrift

Rows = TypeVar("Rows")


class RowLoss(Protocol[Rows]):
    def batches(self, group: GroupBatch) -> Iterator[tuple[Rows, bool]]:
        """This rank's micro-batches and whether they count; as many on every rank. ValueError for an unusable group."""

    def losses(self, group: GroupBatch, rows: Rows, counts: bool) -> Tensor:
        """(R,) with gradient; records metrics of rows that count."""

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        """The proximal pass: this rank's samples under the current weights, remembered until `end_update`."""

    def log_probs(self, group: GroupBatch) -> Tensor:
        """(samples, trained steps) float32 on the CPU, as `omni_async.sde` defines them, under the current weights."""

    def gradient_normaliser(self) -> tuple[float, float]:
        """Two sums over this rank's rows since the last step: the gradient must be multiplied by their quotient, once
        summed over ranks."""

    def end_step(self) -> None:
        """An optimizer step was taken, and the update goes on."""

    def end_update(self, progress: float) -> None:
        """The update is over, or was given up. `progress` is the share of the run's updates that is done."""
