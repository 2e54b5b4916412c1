"""Defines what a rank's engine needs of a kind of loss.

Rows in micro-batches, their losses, and the end of steps and updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from omni_async.algorithms.registry import Objective
from omni_async.algorithms.trajectory_fields import trajectory_fields
from omni_async.config.schema import Config
from omni_async.layout import ParallelLayout
from omni_async.policy import Policy
from omni_async.training.backends.base import TrainBackend
from omni_async.training.device import largest_over_ranks
from omni_async.training.groups import Drawn, GroupBatch
from omni_async.training.metrics import Metrics
from omni_async.training.micro_batches import MicroBatch, micro_batches
from omni_async.types import SampleDrift

Rows = TypeVar("Rows")


class RowLoss(Protocol[Rows]):
    def batches(self, group: GroupBatch) -> Iterator[tuple[Rows, bool]]:
        """Yield this rank's micro-batches and whether they count; as many on every rank.

        ValueError for an unusable group."""

    def losses(self, group: GroupBatch, rows: Rows, counts: bool) -> Tensor:
        """Return the losses (R,) with gradient; records metrics of rows that count."""

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        """Recompute proximal log-probs: this rank's samples under the current weights, remembered until `end_update`.

        Returns their drifts in order, none of a sample that does not count."""

    def gradient_normaliser(self) -> tuple[float, float]:
        """Return two sums over this rank's rows since the last step.

        The gradient must be multiplied by their quotient, once summed over ranks."""

    def end_step(self) -> None:
        """End an optimizer step; the update goes on."""

    def end_update(self, progress: float) -> None:
        """End the update, completed or discarded. `progress` is the share of the run's updates that is done."""


class LossOfObjective:
    """What the built-in `RowLoss`es have in common: the objective, and what rows are made and computed with."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        policy: Policy,
        model: TrainBackend,
        metrics: Metrics,
        layout: ParallelLayout,
    ) -> None:
        self._algorithm = config.algorithm
        self._objective = objective
        self._fields = trajectory_fields(objective, config)
        self._compute = objective.load()
        self._policy = policy
        self._model = model
        self._metrics = metrics
        self._layout = layout
        self._size = config.trainer.micro_batch_size
        self._drawn = Drawn(policy, config.rollout)

    def _micro_batches(self, needs: Sequence[str], unit: int, most: int) -> Iterator[MicroBatch]:
        return micro_batches(needs, self._size, unit, most, self._policy.components, largest_over_ranks)

    def _record_staleness(self, staleness: Tensor) -> None:
        self._metrics.record("row_staleness/mean", staleness.double())
        self._metrics.record("row_staleness/max", staleness.double(), "max")
