"""Defines, as another package would, what tests install through entry points: a kind of rows and an objective on it,
the final latents of a sample being one row and no noise drawn; and a backend, whose ranks each hold the whole model and
sum gradients before a step."""

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
from omni_async.backends import Backend
from omni_async.config.algorithm import Algorithm
from omni_async.config.schema import Config
from omni_async.config.section import Section, doc
from omni_async.layout import ParallelLayout
from omni_async.training.backends.base import TrainBackend
from omni_async.training.device import largest_over_ranks
from omni_async.training.groups import GroupBatch, Needs, check_group, micro_batches
from omni_async.training.metrics import Metrics
from omni_async.training.model import ModuleBackend
from omni_async.training.optimizer import gradients
from omni_async.types import SampleDrift
from tests.fakes import TinyPolicy

_SIGMA = 0.5  # the model is asked for its velocity there


@dataclass(frozen=True)
class Ends:
    """R rows: final (R, T, C), advantage (R,) and conditioning; see `Needs`."""

    final: Tensor
    advantage: Tensor
    conditioning: TensorDict
    needs: Needs


class EndLoss:
    """A `RowLoss` of final latents as they are."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        policy: TinyPolicy,
        model: TrainBackend,
        metrics: Metrics,
        layout: ParallelLayout,
    ) -> None:
        self._config, self._policy, self._model, self._metrics = config, policy, model, metrics
        self._fields = objective.fields
        self._compute = objective.load()
        self._spec = config.rollout.sampling
        self._sigmas = policy.sigmas(config.rollout.num_inference_steps, self._spec)

    def batches(self, group: GroupBatch) -> Iterator[tuple[Ends, bool]]:
        check_group(group, self._fields, self._sigmas, self._policy.latent_shape(self._spec))
        size, samples = self._config.trainer.micro_batch_size, len(group.trajectories)
        needs = [self._policy.component_of(_SIGMA)] * samples
        for batch in micro_batches(needs, size, 1, samples, self._policy.components, largest_over_ranks):
            rows = [group.trajectories[i] for i in batch.rows]
            conditioning = self._policy.stack_conditioning([t["conditioning"] for t in rows])
            advantage = torch.tensor([group.advantages[i] for i in batch.rows])
            its = Needs([needs[i] for i in batch.rows], batch.calls)
            yield Ends(torch.stack([t["final"] for t in rows]), advantage, conditioning, its), batch.counts

    def losses(self, group: GroupBatch, rows: Ends, counts: bool) -> Tensor:
        sigma = torch.full((len(rows.final),), _SIGMA)
        velocity = self._model.velocity(rows.final, sigma, rows.conditioning, self._spec, rows.needs)
        loss = self._compute((velocity, rows.advantage), self._config.algorithm)
        if counts:
            self._metrics.record_loss(loss, rows.advantage, {})
        return loss

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        raise NotImplementedError

    def log_probs(self, group: GroupBatch) -> Tensor:
        raise NotImplementedError

    def gradient_normaliser(self) -> tuple[float, float]:
        return 0.0, 0.0

    def end_step(self) -> None: ...

    def end_update(self, progress: float) -> None: ...


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
