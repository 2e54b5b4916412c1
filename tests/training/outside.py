"""Defines a kind of rows, an objective on it and a backend as another package would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.kinds import Kind
from omni_async.algorithms.registry import Objective
from omni_async.config.algorithm import Algorithm
from omni_async.config.section import Section, doc
from omni_async.plugins.backends import Backend
from omni_async.training.groups import GroupBatch, Needs, check_group
from omni_async.training.model import ModuleBackend
from omni_async.training.optimizer import gradients
from omni_async.training.row_loss import LossOfObjective

_SIGMA = 0.5  # the model is asked for its velocity there


@dataclass(frozen=True)
class Ends:
    """R rows: final (R, T, C), advantage (R,) and conditioning; see `Needs`."""

    final: Tensor
    advantage: Tensor
    conditioning: TensorDict
    needs: Needs


class EndLoss(LossOfObjective):
    """A `RowLoss` of final latents as they are."""

    def batches(self, group: GroupBatch) -> Iterator[tuple[Ends, bool]]:
        shape, sigmas = self._drawn.by(group.spec)
        check_group(group, self._fields, sigmas, shape)
        needs = [self._policy.component_of(_SIGMA)] * len(group.trajectories)
        for batch in self._micro_batches(needs, 1, len(group.trajectories)):
            rows = [group.trajectories[i] for i in batch.rows]
            conditioning = self._policy.stack_conditioning([t["conditioning"] for t in rows])
            advantage = torch.tensor([group.advantages[i] for i in batch.rows])
            its = Needs([needs[i] for i in batch.rows], batch.calls)
            yield Ends(torch.stack([t["final"] for t in rows]), advantage, conditioning, its), batch.counts

    def losses(self, group: GroupBatch, rows: Ends, counts: bool) -> Tensor:
        sigma = torch.full((len(rows.final),), _SIGMA)
        velocity = self._model.velocity(rows.final, sigma, rows.conditioning, group.spec, rows.needs)
        loss = self._compute((velocity, rows.advantage), self._algorithm)
        if counts:
            self._metrics.record_loss(loss, rows.advantage, {})
        return loss


def weighted_energy(inputs: Any, algorithm: Algorithm) -> Tensor:
    velocity, advantage = inputs
    settings: EnergySettings = algorithm.settings
    energy: Tensor = settings.scale * advantage * velocity.abs().pow(settings.power).flatten(1).mean(1)
    return energy


class EnergySettings(Section, kw_only=True, frozen=True):
    power: Annotated[int, doc("Exponent of the velocity.", ge=1, le=4)] = 2
    scale: Annotated[float, doc("Weight of the loss.", gt=0)]


KIND = Kind(
    name="ends",
    summary="trains on final latents as they are",
    loss="tests.training.outside:EndLoss",
    rows_per_sample=lambda config: 1,
)
OBJECTIVE = Objective(
    name="weighted_energy",
    summary="the advantage times the velocity's energy",
    kind="ends",
    compute="tests.training.outside:weighted_energy",
    fields=("final", "conditioning"),
    homogeneous=lambda algorithm: True,
    settings=EnergySettings,
)


class Summing(ModuleBackend):
    """The `TrainBackend` of ranks that each hold all weights."""

    def gradient_norm(self) -> float:
        for gradient in gradients(self.trainable.values()):
            dist.all_reduce(gradient)
        return super().gradient_norm()


BACKEND = Backend("summing", "tests.training.outside:Summing")
