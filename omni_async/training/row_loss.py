"""Defines the interface of a kind of loss: rows in micro-batches, their losses, and the end of steps and updates."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from omni_async.algorithms.kinds import trajectory_fields
from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput, TokenInputs, TransitionInputs
from omni_async.algorithms.registry import Objective
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy
from omni_async.training import TrainingError
from omni_async.training.backends.base import TrainBackend
from omni_async.training.device import largest_over_ranks
from omni_async.training.groups import Drawn, GroupBatch, MicroBatch, micro_batches
from omni_async.training.metrics import Metrics
from omni_async.types import SampleDrift

Rows = TypeVar("Rows")


class RowLoss(Protocol[Rows]):
    def batches(self, group: GroupBatch) -> Iterator[tuple[Rows, bool]]:
        """Yield this rank's micro-batches and whether they count; equally many on every rank.

        Raises ValueError for an unusable group."""

    def losses(self, group: GroupBatch, rows: Rows, counts: bool) -> Tensor:
        """Return the losses (R,) of a micro-batch, with gradient.

        Args:
            group: the group of the rows.
            rows, counts: from `batches`; metrics of rows that count are recorded."""

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        """Recompute proximal log-probs of this rank's samples under the current weights; store them until `end_update`.

        Returns the samples' drifts in order, without samples that do not count."""

    def gradient_normaliser(self) -> tuple[float, float]:
        """Return two sums over this rank's rows since the last step.

        The caller sums them over ranks, and multiplies the gradient by their quotient."""

    def end_step(self) -> None:
        """End an optimizer step that is not the last of its update."""

    def end_update(self, progress: float) -> None:
        """End the update, completed or discarded. `progress` is the completed share of the run's updates."""


class ComputedLoss:
    """The common base of the built-in `RowLoss`es: the objective, and its computation.

    It has no proximal policy and no normaliser, and keeps no state between steps. `policy` follows the contract of the
    kind's rows."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        policy: Any,
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

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        raise TrainingError(
            f"{self._objective.name} has no ratio to the policy that made a sample, so there is no proximal pass"
        )

    def gradient_normaliser(self) -> tuple[float, float]:
        return 0.0, 0.0

    def end_step(self) -> None:
        """Do nothing: no value here depends on the step within an update."""

    def end_update(self, progress: float) -> None:
        """Do nothing: no value here depends on the update."""

    def _computed(self, inputs: TransitionInputs | ForwardInputs | TokenInputs) -> ObjectiveOutput:
        """Compute the objective of R rows.

        Raises TrainingError, with the objective's name, if the objective raises, or does not return one number per row:
        another shape would be averaged into a wrong gradient."""
        where = f"objective {self._objective.name} ({self._objective.compute})"
        try:
            output = self._compute(inputs, self._algorithm)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}, line {last.lineno}"
            raise TrainingError(f"{where} failed: {type(error).__name__}: {error} ({place})") from error
        if not isinstance(output, ObjectiveOutput):
            raise TrainingError(f"{where} returned a {type(output).__name__}, expected an ObjectiveOutput")
        rows = tuple(inputs.advantage.shape)
        for name, values in {
            "loss": output.loss,
            **{f"metric {key}": one for key, one in output.metrics.items()},
        }.items():
            if not isinstance(values, Tensor):
                raise TrainingError(
                    f"{where}: its {name} is a {type(values).__name__}, expected a tensor of shape {rows}"
                )
            if tuple(values.shape) != rows:
                got = tuple(values.shape)
                raise TrainingError(f"{where}: its {name} has shape {got}, expected {rows}, a number per row")
        if not output.loss.requires_grad:
            raise TrainingError(f"{where}: its loss has no gradient; compute it from log_prob, mean or velocity")
        return output

    def _record_staleness(self, staleness: Tensor) -> None:
        self._metrics.record("row_staleness/mean", staleness.double())
        self._metrics.record("row_staleness/max", staleness.double(), "max")


class LossOfObjective(ComputedLoss):
    """The common base of `RowLoss`es whose rows are of latents: builds rows of a policy's components."""

    def __init__(self, config: Config, objective: Objective, policy: Policy, *parts: Any) -> None:
        super().__init__(config, objective, policy, *parts)
        self._size = config.trainer.micro_batch_size
        self._drawn = Drawn(policy, config.rollout)

    def _micro_batches(self, needs: Sequence[str], unit: int, most: int) -> Iterator[MicroBatch]:
        return micro_batches(needs, self._size, unit, most, self._policy.components, largest_over_ranks)
