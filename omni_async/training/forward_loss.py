"""Computes losses of forward-process objectives: final latents are noised anew, however they were made.

Staleness acts through the rewards and the old policy alone, so there is no ratio to a behaviour policy and nothing to
correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from omni_async.algorithms.forward_process import noised
from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.objectives.base import ForwardInputs
from omni_async.algorithms.registry import AuxiliaryPolicy, Objective
from omni_async.algorithms.timesteps import num_draws
from omni_async.config.schema import Config
from omni_async.training.errors import TrainingError
from omni_async.training.forward_rows import ForwardRows, build_rows, make_draws
from omni_async.training.groups import GroupBatch, check_group
from omni_async.training.micro_batches import Needs
from omni_async.training.row_loss import LossOfObjective
from omni_async.types import SampleDrift

_INPUT_OF: dict[AuxiliaryPolicy, str] = {"reference": "ref_velocity", "old": "old_velocity", "ema": "ema_velocity"}


class ForwardLoss(LossOfObjective):
    """The `RowLoss` of forward-process objectives."""

    def __init__(self, config: Config, objective: Objective, *parts: Any) -> None:
        super().__init__(config, objective, *parts)
        algorithm, steps = config.algorithm, config.rollout.num_inference_steps
        self._auxiliary = sorted(objective.auxiliary(algorithm))
        self._paired = find_kind(objective.kind).paired
        self._num_draws = num_draws(steps, algorithm.forward, algorithm.timestep_fraction)
        self._progress = 0.0

    def batches(self, group: GroupBatch) -> Iterator[tuple[ForwardRows, bool]]:
        # Of a pair every rank has its share of the draws, of other groups its share of the samples.
        latent_shape, sigmas = self._drawn.by(group.spec)
        check_group(group, self._fields, sigmas, latent_shape)
        if self._paired and len(group.trajectories) != 2:
            raise ValueError(f"{self._objective.name} trains on pairs, got {len(group.trajectories)} samples")
        forward, fraction = self._algorithm.forward, self._algorithm.timestep_fraction
        draws = [make_draws(seed, latent_shape, sigmas, forward, fraction) for seed in group.seeds]
        number, counts = len(draws[0].sigmas), group.counts
        most = self._layout.most(group.size) * number
        if self._paired:
            mine = self._layout.dealt(number, group.group * number)
            # Without a draw of its own a rank computes another's: the calls are collective.
            draws, counts = [d.taken(mine or range(1)) for d in draws], counts and bool(mine)
            most = 2 * self._layout.most(number)
        count = len(draws[0].sigmas)
        unit = 2 if self._paired else count if self._objective.unit == "sample" else 1
        row_ids = [(i % 2, i // 2) if self._paired else divmod(i, count) for i in range(len(draws) * count)]
        needs = [self._policy.component_of(float(draws[sample].sigmas[k])) for sample, k in row_ids]
        for batch in self._micro_batches(needs, unit, most):
            own, its = [row_ids[i] for i in batch.rows], Needs([needs[i] for i in batch.rows], batch.calls)
            yield build_rows(group, draws, own, its, self._policy, self._model.device), batch.counts and counts

    def losses(self, group: GroupBatch, rows: ForwardRows, counts: bool) -> Tensor:
        x = noised(rows.final, rows.noise, rows.sigma)
        others = {
            _INPUT_OF[auxiliary]: self._model.auxiliary_velocity(
                auxiliary, x, rows.sigma, rows.conditioning, group.spec, rows.needs
            )
            for auxiliary in self._auxiliary
        }
        inputs = ForwardInputs(
            velocity=self._model.velocity(x, rows.sigma, rows.conditioning, group.spec, rows.needs),
            final=rows.final,
            noise=rows.noise,
            sigma=rows.sigma,
            advantage=rows.advantage,
            draws=self._num_draws if self._objective.unit == "sample" else 1,
            progress=self._progress,
            **others,
        )
        output = self._computed(inputs)
        if counts:
            self._record_staleness(rows.staleness)
            self._metrics.record_loss(output.loss, rows.advantage, output.metrics)
        return output.loss

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        raise TrainingError(
            f"{self._objective.name} has no ratio to the policy that made a sample, so there is no proximal pass"
        )

    def gradient_normaliser(self) -> tuple[float, float]:
        return 0.0, 0.0

    def end_step(self) -> None:
        """Do nothing: no value here depends on the step within an update."""

    def end_update(self, progress: float) -> None:
        self._progress = progress
