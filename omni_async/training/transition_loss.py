"""Computes losses of transition objectives: one row is one trained denoising step of one sample.

`transition_rows` builds the rows. `correction.mode` selects the denominator of the ratio. The proximal policy of an
update is the trainer's weights at its start. With one optimizer step per update it is the policy in training, and the
same forward pass evaluates it. Otherwise, and if a correction needs the whole update, its log-probs are recomputed in a
separate pass when a group arrives (`recompute_proximal`), and stored here until the update is over.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.correction import Drift, correct, normaliser
from omni_async.algorithms.kinds import reads_old_means, sde_of
from omni_async.algorithms.objectives.base import TransitionInputs
from omni_async.algorithms.registry import AuxiliaryPolicy, Objective
from omni_async.config.schema import Config
from omni_async.diffusion.policy import modalities_of
from omni_async.diffusion.sde.transitions import Transition, log_prob, log_prob_by_part, nats_per_log_prob, transition
from omni_async.plugins.families import SamplingSpec
from omni_async.training.device import send
from omni_async.training.groups import GroupBatch, calls_of, check_group, find_step
from omni_async.training.mismatch import Rows, clipped_rows, record_mismatch
from omni_async.training.ratio_loss import RatioLoss
from omni_async.training.row_loss import LossOfObjective
from omni_async.training.transition_rows import TransitionRows, build_rows, trained_steps
from omni_async.types import SampleDrift


@dataclass(frozen=True)
class Proximal:
    """R rows under the proximal policy: log_prob (R,) float64, mean (R, *shape) or None, kappa (R,) float64 or None.

    `mean` is None if it was not kept. `kappa` is D kappa in nats, the exact KL of each step from the policy that took
    it; None if that policy's means are unknown."""

    log_prob: Tensor
    mean: Tensor | None
    kappa: Tensor | None


def under_current(rows: TransitionRows, step: Transition, log_prob: Tensor) -> Proximal:
    """Return these rows with the policy in training as the proximal policy, detached.

    Args:
        rows: read for the behaviour policy's means.
        step: the policy's Gaussians of these rows.
        log_prob: (R,) float64, the policy's."""
    kappa = None
    if rows.behaviour_mean is not None:
        squares = (step.mean.detach() - rows.behaviour_mean).square().flatten(1).mean(dim=1, dtype=torch.float64)
        kappa = rows.num_elements * squares / (2 * step.scale.double().square())
    return Proximal(log_prob.detach(), step.mean.detach(), kappa)


RowKey = tuple[int, int, int]  # group, sample, number among the sample's trained rows


def row_keys(group: GroupBatch, rows: TransitionRows) -> list[RowKey]:
    """Return the keys of rows; joining groups does not change them."""
    return [(*group.sample_ids[sample], n) for sample, n in rows.row_ids]


class ProximalPasses:
    """The results of proximal passes over this rank's samples, by row; on the CPU."""

    def __init__(self, keep_means: bool) -> None:
        self._keep_means = keep_means
        self._rows: dict[RowKey, Proximal] = {}

    def remember(self, keys: Sequence[RowKey], found: Proximal) -> None:
        """Store the rows of a pass.

        Args:
            keys: of the rows, as `row_keys` returns them.
            found: these rows; their means are stored only with `keep_means`."""
        means = found.mean.cpu() if found.mean is not None and self._keep_means else None
        log_probs, kappas = found.log_prob.cpu(), None if found.kappa is None else found.kappa.cpu()
        for i, key in enumerate(keys):
            mean, kappa = (None if rows is None else rows[i] for rows in (means, kappas))
            self._rows[key] = Proximal(log_probs[i], mean, kappa)

    def recall(self, keys: Sequence[RowKey], device: torch.device) -> Proximal | None:
        """Return rows of a pass, or None if there was no pass.

        Args:
            keys: as in `remember`; either all of these rows were in a pass, or none.
            device: the device of the result."""
        if keys[0] not in self._rows:
            return None
        found = [self._rows[key] for key in keys]
        means, kappas = [p.mean for p in found if p.mean is not None], [p.kappa for p in found if p.kappa is not None]
        return Proximal(
            send(torch.stack([p.log_prob for p in found]), device),
            send(torch.stack(means), device) if means else None,
            send(torch.stack(kappas), device) if kappas else None,
        )

    def clear(self) -> None:
        self._rows.clear()


def sample_drifts(
    row_ids: Sequence[tuple[int, int]],
    steps: Sequence[int],
    log_ratio: Tensor,
    kappa: Tensor | None,
    num_elements: int,
) -> list[SampleDrift]:
    """Collect rows into samples, in the order of their ids, for any order of the rows.

    Args:
        row_ids, steps: as in `TransitionRows`.
        log_ratio: (R,) float64, of the whole sample in nats.
        kappa: (R,) float64, D kappa in nats; None: unknown.
        num_elements: D, the latent elements of a sample."""
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(row_ids)), key=row_ids.__getitem__):
        rows.setdefault(row_ids[i][0], []).append(i)
    nats, kappas = log_ratio.tolist(), None if kappa is None else kappa.tolist()

    def of(values: list[float], own: list[int]) -> array[float]:
        return array("d", [values[row] for row in own])

    return [
        SampleDrift(
            of(nats, own),
            None if kappas is None else of(kappas, own),
            num_elements,
            tuple(steps[row] for row in own),
        )
        for own in rows.values()
    ]


_INPUT_OF: dict[AuxiliaryPolicy, str] = {"reference": "ref_mean", "teacher": "teacher_mean"}


class TransitionLoss(RatioLoss, LossOfObjective):
    """The `RowLoss` of transition objectives. `omni_async.training.engine` documents the order of calls."""

    def __init__(self, config: Config, objective: Objective, *parts: Any) -> None:
        self._sde = sde_of(config)
        super().__init__(config, objective, *parts)
        self._frozen = [name for name in _INPUT_OF if name in objective.auxiliary(config.algorithm)]
        self._whole_samples = objective.unit == "sample" or self._correction.needs_samples
        self._passes = ProximalPasses(keep_means=reads_old_means(objective, config.algorithm))

    def batches(self, group: GroupBatch) -> Iterator[tuple[TransitionRows, bool]]:
        latent_shape, sigmas = self._drawn.by(group.spec)
        window = check_group(group, self._fields, sigmas, latent_shape)
        calls, fraction = len(calls_of(group.trajectories[0])), self._algorithm.timestep_fraction
        chosen = [trained_steps(seed, window, fraction, calls) for seed in group.seeds]
        count, most = len(chosen[0]), self._layout.most(group.size)
        samples = zip(group.trajectories, chosen, strict=True)
        needs = [self._component(t, k) for t, positions in samples for k in positions]
        rows = range(len(needs))
        # A denoiser may separate calls with and without a conditioning image, and all ranks must call it equally often.
        # So rows of the same call share micro-batches, unless whole samples stay together.
        per_call = count if self._whole_samples else count // calls
        for first in range(0, count, per_call):
            part = [row for row in rows if first <= row % count < first + per_call]
            unit = count if self._whole_samples else 1
            for batch in self._micro_batches([needs[row] for row in part], unit, most * per_call):
                batch = replace(batch, rows=[part[i] for i in batch.rows])
                built = build_rows(group, chosen, batch, needs, self._policy, self._model.device)
                yield built, batch.counts and group.counts

    def _component(self, trajectory: TensorDict, position: int) -> str:
        """Return the component that a trained step needs."""
        call, k = find_step(trajectory, position)
        return self._policy.component_of(float(call["sigmas"][call["steps"][k]]))

    def losses(self, group: GroupBatch, rows: TransitionRows, counts: bool) -> Tensor:
        others = {}
        for policy in self._frozen:
            teacher = self._algorithm.teacher if policy == "teacher" else None
            spec = group.spec if teacher is None else teacher.spec_of(group.spec)
            velocity = self._model.auxiliary_velocity(
                policy, rows.latents, rows.sigma, rows.conditioning, spec, rows.needs
            )
            others[_INPUT_OF[policy]] = self._transition(rows, velocity).mean
        step, value, velocity = self._current(rows, group.spec)
        mode = self._mode(group)
        passed = self._passes.recall(row_keys(group, rows), rows.latents.device)
        proximal = passed or under_current(rows, step, value)
        per_log_prob = self._nats_per_log_prob(rows, step)
        old_log_prob, old_mean = self._old(mode, rows, per_log_prob, value.detach(), proximal)
        drift = self._drift(rows, per_log_prob, proximal)
        weight = rows.weight if rows.weight is not None else self._row_weights(rows, drift, counts)
        output = self._computed(
            TransitionInputs(
                log_prob=value,
                old_log_prob=old_log_prob,
                advantage=rows.advantage,
                mean=step.mean,
                old_mean=old_mean,
                std=step.std,
                scale=step.scale,
                nats_per_log_prob=per_log_prob,
                num_elements=rows.num_elements,
                kind=self._sde.kind,
                weight=weight,
                steps_per_sample=self._steps_per_sample(rows),
                **others,
            )
        )
        if counts:
            self._record_drift(rows, drift, group)
            self._record_modalities(rows, step, group.spec)
            if self._first_step:  # in later steps of an update the policy has moved on purpose
                nats = per_log_prob * (proximal.log_prob - rows.behaviour_log_prob)
                found = Rows(nats, step.nats_per_velocity, velocity, rows.num_elements, rows.steps, rows.fresh)
                outside = clipped_rows(output.metrics, weight, nats)
                record_mismatch(self._metrics, found, outside)
                if mode == "bypass":
                    self._metrics.record("drift_clipped", outside)
            if weight is not None:
                self._record_weights(weight)
                self._metrics.record_by_step("weight/mean", weight, rows.steps, "mean")
                self._metrics.record_by_step("masked", (weight == 0).double(), rows.steps, "mean")
            self._metrics.record_loss(output.loss, rows.advantage, output.metrics)
        return output.loss

    @torch.no_grad()
    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        row_ids: list[tuple[int, int]] = []
        steps: list[int] = []
        drifts: list[Drift] = []
        for rows, counts in self.batches(group):
            step, value, _ = self._current(rows, group.spec)
            if not counts:
                continue
            proximal = under_current(rows, step, value)
            self._passes.remember(row_keys(group, rows), proximal)
            row_ids += rows.row_ids
            steps += rows.steps
            drifts.append(self._drift(rows, self._nats_per_log_prob(rows, step), proximal))
        if not drifts:
            return []
        log_ratio = torch.cat([d.log_ratio for d in drifts])[:, 0]
        kappas = [d.kappa for d in drifts if d.kappa is not None]
        num_elements = math.prod(self._drawn.by(group.spec)[0])
        return sample_drifts(row_ids, steps, log_ratio, torch.cat(kappas)[:, 0] if kappas else None, num_elements)

    def end_update(self, progress: float) -> None:
        super().end_update(progress)
        self._passes.clear()

    def _steps_per_sample(self, rows: TransitionRows) -> int:
        return 1 + max(n for _, n in rows.row_ids) if self._whole_samples else 1

    def _current(self, rows: TransitionRows, spec: SamplingSpec) -> tuple[Transition, Tensor, Tensor]:
        """Return the Gaussians, the log-probs and the velocities of the policy in training."""
        velocity = self._model.velocity(rows.latents, rows.sigma, rows.conditioning, spec, rows.needs)
        step = self._transition(rows, velocity)
        return step, log_prob(self._sde.kind, rows.next_latents, step.mean, step.scale), velocity

    def _transition(self, rows: TransitionRows, velocity: Tensor) -> Transition:
        # In float64, unrounded, as in the engines.
        noise_level = torch.full_like(rows.sigma, self._sde.noise_level, dtype=torch.float64)
        return transition(
            self._sde.kind, rows.latents, velocity, rows.sigma, rows.sigma_next, rows.sigma_max, noise_level
        )

    def _old(
        self, mode: str, rows: TransitionRows, per_log_prob: Tensor, current: Tensor, proximal: Proximal
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-prob and mean of the ratio's denominator in a mode of `algorithm.correction`."""
        if mode in ("decoupled", "none"):
            return proximal.log_prob, proximal.mean
        if mode == "bypass":
            return rows.behaviour_log_prob, rows.behaviour_mean
        return self._interpolated(rows, per_log_prob, current), None

    def _drift(self, rows: TransitionRows, per_log_prob: Tensor, proximal: Proximal) -> Drift:
        """Return the drift (R, 1), separately for every row, from the behaviour policy to the proximal policy."""
        log_ratio = self._log_ratio(rows, per_log_prob, proximal.log_prob)
        return Drift(log_ratio[:, None], None if proximal.kappa is None else proximal.kappa[:, None])

    def _nats_per_log_prob(self, rows: TransitionRows, step: Transition) -> Tensor:
        return nats_per_log_prob(self._sde.kind, step.scale.double(), rows.num_elements)

    def _row_weights(self, rows: TransitionRows, drift: Drift, counts: bool) -> Tensor | None:
        """Return the weights of these rows, for corrections that need no other rows; None without a correction."""
        c = self._correction
        if c.weights == "none" and not c.masks:
            return None
        shape = (-1, self._steps_per_sample(rows))
        drift = Drift(drift.log_ratio.reshape(shape), None if drift.kappa is None else drift.kappa.reshape(shape))
        corrected = correct(drift, c, rows.num_elements)
        if counts:
            numerator, denominator = normaliser(corrected, c)
            self._normaliser[0] += numerator
            self._normaliser[1] += denominator
            self._record_corrected(corrected)
        return corrected.weight.flatten()

    def _record_drift(self, rows: TransitionRows, drift: Drift, group: GroupBatch) -> None:
        by_step, nats = self._metrics.record_by_step, drift.log_ratio.flatten()
        self._record_ratio(nats, [group.sample_ids[sample] for sample, _ in rows.row_ids], rows.staleness)
        by_step("log_ratio_nats/variance", nats, rows.steps, "variance")
        by_step("ess", nats, rows.steps, "ess")
        if drift.kappa is not None:
            self._metrics.record("kappa_nats", drift.kappa)
            by_step("kappa_nats", drift.kappa.flatten(), rows.steps, "mean")

    def _record_modalities(self, rows: TransitionRows, step: Transition, spec: SamplingSpec) -> None:
        """Record, for each modality, the log-probs of the policy in training and its log-ratios in nats."""
        if rows.behaviour_by_modality is None:
            return
        modalities, mean, kind = modalities_of(self._policy, spec), step.mean.detach(), self._sde.kind
        values = log_prob_by_part(kind, rows.next_latents, mean, step.scale, modalities.values())
        for (name, part), value, old in zip(
            modalities.items(), values, rows.behaviour_by_modality.unbind(1), strict=True
        ):
            factor = nats_per_log_prob(kind, step.scale.double(), mean[0, part].numel())
            nats = factor * (value - old)
            self._metrics.record(f"log_prob/{name}", value)
            self._metrics.record(f"log_ratio_nats/{name}/mean", nats)
            self._metrics.record(f"log_ratio_nats/{name}/absmax", nats, "absmax")
