"""Defines what a rank's engine needs of a kind of loss: rows in micro-batches, their losses, and the end of steps and
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
        """Yields this rank's micro-batches and whether they count; as many on every rank. ValueError for an unusable
        group."""

    def losses(self, group: GroupBatch, rows: Rows, counts: bool) -> Tensor:
        """Returns the losses (R,) with gradient; records metrics of rows that count."""

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        """Recomputes proximal log-probs: this rank's samples under the current weights, remembered until
        `end_update`. Returns their drifts in order, none of a sample that does not count."""

    def gradient_normaliser(self) -> tuple[float, float]:
        """Returns two sums over this rank's rows since the last step: the gradient must be multiplied by their
        quotient, once summed over ranks."""

    def end_step(self) -> None:
        """Ends an optimizer step; the update goes on."""

    def end_update(self, progress: float) -> None:
        """Ends the update, completed or discarded. `progress` is the share of the run's updates that is done."""
