"""Computes losses of forward-process objectives, which add noise to final latents of any origin.

One row is one noise draw of one sample's final latents, sample-major: (sample 0, draw 0), (sample 0, draw 1), ...; for
preference pairs (winner, draw 0), (loser, draw 0), (winner, draw 1), ... A sample's sigmas and noises depend on its
seed alone, not on micro-batches and ranks. The two samples of a pair have the same seed.

Staleness acts only through the rewards and the old policy, so there is no ratio to a behaviour policy and no
correction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.kinds import find_kind, num_draws
from omni_async.algorithms.objectives.base import ForwardInputs
from omni_async.algorithms.objectives.forward import draw_sigmas, noised
from omni_async.algorithms.registry import AuxiliaryPolicy, Objective
from omni_async.config.algorithm import Forward
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy
from omni_async.diffusion.sde.noise import generator_of, standard_normal
from omni_async.training.device import send
from omni_async.training.groups import GroupBatch, Needs, check_group
from omni_async.training.row_loss import LossOfObjective


@dataclass(frozen=True)
class ForwardRows:
    """R rows on the trainer's device: final, noise (R, *shape) and sigma, advantage (R,) float32.

    staleness (R,) int64 is the largest of the sample's steps."""

    final: Tensor
    noise: Tensor
    sigma: Tensor
    advantage: Tensor
    staleness: Tensor
    conditioning: TensorDict
    needs: Needs


@dataclass(frozen=True)
class Draws:
    """The noise draws of one sample: sigmas (K,) and noises (K, *shape), float32 on the CPU."""

    sigmas: Tensor
    noises: Tensor


def make_draws(seed: int, shape: tuple[int, ...], sigmas: Tensor, forward: Forward, fraction: float) -> Draws:
    """Make the noise draws of one sample.

    Args:
        seed: the sample's.
        shape: the shape of its latents.
        sigmas: the sampler's schedule (N + 1,).
        forward, fraction: `algorithm.forward` and `algorithm.timestep_fraction`, which set the number of draws."""
    generator = generator_of(seed, "forward process")
    drawn = draw_sigmas(sigmas, forward, fraction, generator).to(torch.float32)
    return Draws(drawn, standard_normal(generator, (len(drawn), *shape)))


def build_rows(
    group: GroupBatch,
    draws: Sequence[Draws],
    row_ids: Sequence[tuple[int, int]],
    needs: Needs,
    policy: Policy,
    device: torch.device,
) -> ForwardRows:
    """Build rows of a group.

    Args:
        group: this rank's samples, checked.
        draws: the draws of each sample, equally many for every sample.
        row_ids: (sample, draw) of each row.
        needs: the components of these rows.
        policy: stacks their conditioning.
        device: the device of the rows."""
    trajectories = [group.trajectories[sample] for sample, _ in row_ids]
    return ForwardRows(
        final=send(torch.stack([t["final"] for t in trajectories]), device),
        noise=send(torch.stack([draws[sample].noises[k] for sample, k in row_ids]), device),
        sigma=send(torch.stack([draws[sample].sigmas[k] for sample, k in row_ids]), device),
        advantage=send(torch.tensor([group.advantages[s] for s, _ in row_ids], dtype=torch.float32), device),
        staleness=send(torch.tensor([max(group.staleness[s], default=0) for s, _ in row_ids]), device),
        conditioning=policy.stack_conditioning([t["conditioning"] for t in trajectories]).to(device),
        needs=needs,
    )


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
        # A rank has a share of a pair's draws, and a share of other groups' samples.
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
            # A rank without a draw computes another rank's draw, because the calls are collective.
            taken = list(mine or range(1))
            draws, counts = [Draws(d.sigmas[taken], d.noises[taken]) for d in draws], counts and bool(mine)
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

    def end_update(self, progress: float) -> None:
        self._progress = progress
