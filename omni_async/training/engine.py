"""One rank of the trainer: gradients from prompt groups, optimizer steps, weights out, checkpoints. It knows no Ray and no model family.

The engine waits for nobody but its fellow ranks. `setup`, `accumulate`, `step`, `log_probs`, `export`, `save` and `load` are collective:
with several ranks, every rank calls the same ones in the same order, `accumulate` and `log_probs` with its own samples of the same group
(at most ceil(group_size / workers), at least one). `discard` is local, but all ranks must make the same choice.

    for group in update:  accumulate(this rank's samples, row_weight=1 / (samples of the update * W))
    metrics = step()      # gradient of the mean loss over samples and steps
    weights = export(version)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveSettings, StepInputs, resolve_clip_range
from omni_async.algorithms.registry import find_objective
from omni_async.config.schema import Config
from omni_async.policy import Policy
from omni_async.sde.transitions import Transition, log_prob, transition
from omni_async.training import checkpoint
from omni_async.training.device import rank_device
from omni_async.training.errors import TrainingError
from omni_async.training.metrics import Metrics
from omni_async.training.model import TrainedModel, whole
from omni_async.training.optimizer import build_optimizer, clip_factor, gradient_norm, gradients, learning_rate, set_learning_rate
from omni_async.training.rows import GroupBatch, Rows, build_rows, check_group, micro_batches
from omni_async.types import WeightManifest
from omni_async.weights.buckets import Bucket, pack
from omni_async.weights.lora import merged_weights

__all__ = ["GroupBatch", "TrainEngine"]


class TrainEngine:
    """See the module. `device` is the rank's accelerator unless given.

    digest0: digest of the weights as loaded, in `model.dtype` (rank 0, after `setup`); an engine that loaded the same checkpoint has it too.
    optimizer_steps: taken so far, over resumes.
    """

    def __init__(self, config: Config, policy: Policy, rank: int, world_size: int, device: torch.device | None = None) -> None:
        if config.weights.payload == "lora" and config.model.lora is None:
            raise ValueError("weights.payload: lora needs model.lora")
        self.config = config
        self.policy = policy
        self.rank = rank
        self.world_size = world_size
        self.device = rank_device(rank) if device is None else device
        self.optimizer_steps = 0
        self.digest0 = ""
        rollout, algorithm = config.rollout, config.algorithm
        self._latent_shape = policy.latent_shape(rollout.height, rollout.width)
        self._num_elements = math.prod(self._latent_shape)
        self._sigmas = policy.sigmas(rollout.num_inference_steps, rollout.height, rollout.width).cpu()
        self._objective = find_objective(algorithm.name)
        self._settings = ObjectiveSettings(
            clip_range=resolve_clip_range(algorithm.clip_range, algorithm.clip_range_nats, self._num_elements),
            kl_coef=algorithm.kl_coef,
            kl_form=algorithm.kl_form,
        )
        self._metrics = Metrics()
        self._has_rows = False

    def setup(self) -> None:
        """Loads the model and builds the optimizer. With several ranks, join the process group first."""
        self._model = TrainedModel(self.config, self.policy, self.device, self.rank, self.world_size)
        self.digest0 = self._model.digest
        self._trainable = self._model.trainable()
        self._optimizer = build_optimizer(self.config.trainer.optimizer, self._trainable.values())

    def accumulate(self, group: GroupBatch, row_weight: float) -> None:
        """Adds `row_weight` times the gradient of the summed row losses of `group`, over all ranks. ValueError for an unusable group,
        before any gradient is touched."""
        for rows, counts in self._rows(group):
            # FSDP2 averages gradients over ranks, where the definition of row_weight wants their sum.
            weight = row_weight * self.world_size if counts else 0.0
            torch.autograd.backward(self._row_losses(rows, counts).sum() * weight)
        self._has_rows = True

    def step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Multiplies the accumulated gradients by `grad_scale`, clips, steps the optimizer; metrics over all ranks' rows since the last step.

        `loss` and `advantage_abs` are reported with `grad_scale` applied. TrainingError, leaving weights as they are, if the gradient norm
        is not finite or nothing was accumulated.
        """
        if not self._has_rows:
            raise TrainingError(f"optimizer step {self.optimizer_steps}: no group was accumulated")
        grads = gradients(self._trainable.values())
        norm = gradient_norm(grads) * abs(grad_scale)
        if not math.isfinite(norm):
            raise TrainingError(f"optimizer step {self.optimizer_steps}: the gradient norm is {norm}; no weight was changed")
        factor = grad_scale * clip_factor(norm, self.config.trainer.optimizer.max_grad_norm)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        rate = learning_rate(self.config.trainer, self.optimizer_steps)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._has_rows = False
        self.optimizer_steps += 1
        metrics = self._metrics.reduce(self.config.rollout.num_inference_steps)
        for name in ("loss", "advantage_abs"):
            metrics[name] *= grad_scale
        return {**metrics, "grad_norm": norm, "lr": rate}

    def discard(self) -> None:
        """Forgets everything accumulated since the last step, gradients and metrics."""
        self._optimizer.zero_grad(set_to_none=True)
        self._metrics.clear()
        self._has_rows = False

    @torch.no_grad()
    def log_probs(self, group: GroupBatch) -> Tensor:
        """(samples, W) float32 on the CPU: log-probs of this rank's samples under the current weights, as `omni_async.sde` defines them."""
        values = []
        for rows, counts in self._rows(group):
            _, value = self._policy_log_prob(rows)
            if counts:
                values.append(value.cpu())
        return torch.cat(values).reshape(len(group.trajectories), -1)

    @torch.no_grad()
    def export(self, version: int) -> tuple[WeightManifest, list[Bucket]] | None:
        """The current weights as published version `version`, on rank 0; None elsewhere.

        Payload `full`: every parameter in `model.dtype` under its diffusers name, adapters merged in float32. Payload `lora`: the adapters
        in float32, with `rank`, `alpha` and `target_modules` in the manifest; merging them gives the `full` payload bit for bit.
        """
        payload, lora = self.config.weights.payload, self.config.model.lora
        adapters = self._model.adapters()
        if payload == "lora":
            tensors = ((name, whole(p)) for name, p in adapters.items())
        else:
            scale = lora.alpha / lora.rank if lora is not None else 1.0
            merged = merged_weights(self._model.base(), adapters, scale, gather=whole)
            tensors = ((name, p.to(self._model.dtype)) for name, p in merged)
        if self.rank != 0:
            for _ in tensors:
                pass
            return None
        about = None
        if payload == "lora" and lora is not None:
            about = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": list(lora.target_modules)}
        return pack(tensors, version=version, payload=payload, bucket_bytes=self.config.weights.bucket_mb * 2**20, lora=about)

    def save(self, folder: str | Path, extra: dict[str, Any]) -> None:
        """Writes a checkpoint: trained parameters, optimizer, step count and `extra` (plain JSON values). Call it between steps:
        gradients are not kept."""
        checkpoint.save(Path(folder), self._trainable, self._optimizer, checkpoint.State(self.optimizer_steps, extra))

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continues from a checkpoint (any number of ranks may have written it) and returns its `extra`."""
        self.discard()
        state = checkpoint.load(Path(folder), self._trainable, self._optimizer)
        self.optimizer_steps = state.optimizer_steps
        return state.extra

    def _rows(self, group: GroupBatch) -> Iterator[tuple[Rows, bool]]:
        """This rank's micro-batches and whether they count; as many on every rank."""
        window = check_group(group, self._objective.fields, self._sigmas, self._latent_shape)
        size = self.config.trainer.micro_batch_size
        num_samples = len(group.trajectories)
        if self.world_size > 1:
            num_samples = -(-self.config.rollout.group_size // self.world_size)
        num_batches = -(-num_samples * window // size)
        for indices, counts in micro_batches(len(group.trajectories) * window, size, num_batches):
            yield build_rows(group, indices, window, self.policy, self.device), counts

    def _policy_log_prob(self, rows: Rows) -> tuple[Transition, Tensor]:
        velocity = self._model.velocity(rows.latents, rows.sigma, rows.conditioning)
        step = self._transition(rows, velocity)
        return step, log_prob(self.config.rollout.sde.kind, rows.next_latents, step.mean, step.scale)

    def _transition(self, rows: Rows, velocity: Tensor) -> Transition:
        sde = self.config.rollout.sde
        noise_level = torch.full_like(rows.sigma, sde.noise_level, dtype=torch.float64)  # unrounded, as the engines have it
        return transition(sde.kind, rows.latents, velocity, rows.sigma, rows.sigma_next, rows.sigma_max, noise_level)

    def _row_losses(self, rows: Rows, counts: bool) -> Tensor:
        """(R,) losses with gradient; records metrics of rows that count."""
        reference = None
        if self._settings.kl_coef > 0:
            reference = self._transition(rows, self._model.reference_velocity(rows.latents, rows.sigma, rows.conditioning)).mean
        step, value = self._policy_log_prob(rows)
        inputs = StepInputs(
            log_prob=value,
            old_log_prob=rows.old_log_prob,
            advantage=rows.advantage,
            mean=step.mean,
            old_mean=rows.old_mean,
            std=step.std,
            scale=step.scale,
            ref_mean=reference,
            num_elements=self._num_elements,
            kind=self.config.rollout.sde.kind,
        )
        output = self._objective.compute(inputs, self._settings)
        if counts:
            self._record(output.loss, output.metrics, rows)
        return output.loss

    def _record(self, loss: Tensor, row_metrics: dict[str, Tensor], rows: Rows) -> None:
        record = self._metrics.record
        record("loss", loss)
        record("advantage_abs", rows.advantage.abs())
        for name, values in row_metrics.items():
            if name != "log_ratio_nats":
                record(name, values)
        if {"clipped_low", "clipped_high"} <= row_metrics.keys():
            record("clip_fraction", row_metrics["clipped_low"] + row_metrics["clipped_high"])
        if (nats := row_metrics.get("log_ratio_nats")) is not None:
            record("log_ratio_nats/mean", nats)
            record("log_ratio_nats/variance", nats, "variance")
            record("log_ratio_nats/absmax", nats, "absmax")
            record("ess", nats, "ess")
            self._metrics.record_by_step("log_ratio_nats/variance", nats, rows.steps)
