"""Runs one rank of the trainer: gradients from prompt groups, optimizer steps, snapshots of weights, checkpoints.

It depends on neither Ray nor a model family.

The engine waits only for the other ranks. `setup`, `recompute_proximal`, `accumulate`, `step`, `snapshot`,
`begin_save` and `load` are collective: with several ranks, every rank makes the same calls in the same order. A call
with a group takes the rank's own samples of that group, as its `ParallelLayout` deals them. For a preference pair it
takes both samples; a rank without a sample takes another rank's (see `GroupBatch.counts`). `discard` is local, but all
ranks must make the same choice.

    for group in update:  recompute_proximal(this rank's samples)  # if a correction needs it before the first step
    for group in update:  accumulate(this rank's samples, row_weight=1 / rows of the optimizer step)
    metrics = step()      # gradient of the mean loss over rows
    weights = snapshot(version, buckets)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy
from omni_async.tokens.policy import TokenPolicy
from omni_async.training import TrainingError
from omni_async.training.backends.base import build_backend
from omni_async.training.device import rank_device, sum_of_rows, sum_over_ranks
from omni_async.training.flops import FlopMeter, peak_tflops
from omni_async.training.groups import GroupBatch, joined
from omni_async.training.metrics import Metrics
from omni_async.training.model import ModuleBackend
from omni_async.training.optimizer import clip_factor, ema_decay, learning_rate, step_size_factor
from omni_async.training.row_loss import RowLoss
from omni_async.types import SampleDrift
from omni_async.weights.buckets import BucketSet
from omni_async.weights.lora import merged_weights
from omni_async.weights.shards import own_rows, rows_like, whole
from omni_async.weights.snapshot import Snapshot

__all__ = ["GroupBatch", "TrainEngine"]


class TrainEngine:
    """The training engine of one rank, as the module describes it. `device` defaults to the rank's accelerator.

    digest0: the digest of the loaded weights in `model.dtype` (rank 0, after `setup`); an engine that loaded the same
    checkpoint has the same digest. optimizer_steps: the number of steps so far, including steps before a resume."""

    def __init__(
        self,
        config: Config,
        policy: Policy | TokenPolicy,
        layout: ParallelLayout,
        device: torch.device | None = None,
    ) -> None:
        if config.weights.payload == "lora" and config.model.lora is None:
            raise ValueError("weights.payload: lora needs model.lora")
        self.config = config
        self.policy: Any = policy  # of the contract that the objective's kind needs
        self.layout = layout
        self.device = rank_device(layout.rank) if device is None else device
        self.optimizer_steps = 0
        self.digest0 = ""
        self._objective = find_objective(config.algorithm.name)
        self._metrics = Metrics(layout)
        self._has_rows = False
        self._waiting: list[tuple[GroupBatch, float]] = []  # groups, with their row weights, of one spec

    def setup(self) -> None:
        """Load the model and build the optimizer. With several ranks, join the process group first."""
        layout = self.layout
        self._model = build_backend(self.config, self._objective, self.policy, self.device, layout)
        self.digest0 = self._model.digest
        self._base, self._adapters = self._model.base(), self._model.adapters()
        self._flops, self._peak = self._meter(), self.config.trainer.peak_tflops
        if self._peak is None:
            self._peak = peak_tflops(self.device, self._model.dtype)
        # Every kind defines its own rows, which no other code reads.
        self._loss: RowLoss[Any] = find_kind(self._objective.kind).load_loss()(
            self.config, self._objective, self.policy, self._model, self._metrics, layout
        )

    def _meter(self) -> FlopMeter | None:
        """Return the counter of operations; None if a backend's model does not consist of modules.

        None for compiled layers on tokens, too: rows of new lengths would be counted uncompiled."""
        model: object = self._model
        compiles = self.config.trainer.compile
        if not isinstance(model, ModuleBackend) or (compiles and isinstance(self.policy, TokenPolicy)):
            return None
        backward = 1 if self.config.model.lora is not None else 2
        return FlopMeter(dict(model.components.items()), backward, compiles)

    def accumulate(self, group: GroupBatch, row_weight: float) -> None:
        """Add `row_weight` times the gradient of the summed row losses of `group`, over all ranks.

        The group waits until `trainer.groups_per_micro_batch` groups can share micro-batches, at most until `step`.
        Raises ValueError for an unusable group, before it contributes any gradient."""
        if self._waiting and (self._waiting[0][0].spec, self._waiting[0][1]) != (group.spec, row_weight):
            self._accumulate_waiting()
        self._waiting.append((group, row_weight))
        if len(self._waiting) == self.config.trainer.groups_per_micro_batch:
            self._accumulate_waiting()

    def _accumulate_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        group, row_weight = joined([one for one, _ in waiting]), waiting[0][1]
        for rows, counts in self._loss.batches(group):
            done = self._flops.flops if self._flops is not None else 0
            self._model.backward(self._loss.losses(group, rows, counts), row_weight if counts else 0.0)
            if self._flops is not None and not counts:
                self._flops.flops = done  # the row is of another rank's sample
        self._has_rows = True

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        """Recompute the proximal log-probs of this rank's samples for decoupled corrections.

        `accumulate` uses them until the update's last step."""
        return self._loss.recompute_proximal(group)

    def step(self, grad_scale: float = 1.0) -> dict[str, float]:
        """Multiply the accumulated gradients by `grad_scale`, clip them and step the optimizer.

        Returns metrics over all ranks' rows since the last step. `loss` and `advantage_abs` are reported with
        `grad_scale` applied, `loss` also with the correction's normaliser. Raises TrainingError, with the weights
        unchanged, if the gradient norm is not finite or nothing was accumulated."""
        self._accumulate_waiting()
        if not self._has_rows:
            raise TrainingError(f"optimizer step {self.optimizer_steps}: no group was accumulated")
        optimizer, loss_scale = self.config.trainer.optimizer, grad_scale * self._normalise()
        gradient_norm = self._model.gradient_norm()
        norm = gradient_norm * abs(loss_scale)
        if not math.isfinite(norm):
            raise TrainingError(
                f"optimizer step {self.optimizer_steps}: the gradient norm is {norm}; no weight was changed, and the"
                " run's checkpoints are sound: resume with checkpoint.resume=auto and, if it happens again, a lower"
                " trainer.optimizer.lr or reward.max_abs"
            )
        metrics, left = self._metrics.reduce(self.config.rollout.num_inference_steps), 1.0
        if optimizer.max_alignment is not None:
            metrics["alignment"], left = self._model.limit_alignment(gradient_norm, optimizer.max_alignment)
        if optimizer.step_size is not None:
            metrics["lr_factor"] = step_size_factor(optimizer.step_size, metrics)
        rate = learning_rate(self.config.trainer, self.optimizer_steps) * metrics.get("lr_factor", 1.0)
        self._model.step(loss_scale * clip_factor(norm * left, optimizer.max_grad_norm), rate)
        self._has_rows = False
        self.optimizer_steps += 1
        self._follow()
        metrics["loss"] *= loss_scale
        metrics["advantage_abs"] *= grad_scale
        return {**metrics, "grad_norm": norm, "lr": rate}

    def operations(self) -> dict[str, float]:
        """Return `flops/sum`, the operations of all ranks since the last call, and `peak_tflops` of a rank.

        Operations are in FLOPs, as `training.flops` counts them. Unknown numbers are left out. Collective."""
        if self._flops is None:
            return {}
        found = {"flops/sum": sum_over_ranks(float(self._flops.take()))}
        return found if self._peak is None else {**found, "peak_tflops": self._peak}

    def _normalise(self) -> float:
        """Return the remaining factor for weights and masks that were computed row by row.

        It divides by the unmasked rows over all ranks."""
        sums = torch.tensor(self._loss.gradient_normaliser(), dtype=torch.float64)
        numerator, denominator = sum_of_rows(self.layout, sums).tolist()
        return 1.0 if numerator == denominator else numerator / denominator if denominator > 0 else 0.0

    def _follow(self) -> None:
        """Update the moving average after an optimizer step, and the old policy after an update's last step."""
        auxiliary, ema = self._model.auxiliary, self.config.trainer.ema
        if ema is not None and self.optimizer_steps % ema.every == 0:
            auxiliary.follow("ema", ema_decay(self.optimizer_steps - 1, ema.decay, ema.warmup))
        update, step = divmod(self.optimizer_steps, self.config.trainer.steps_per_update)
        if step == 0 and "old" in auxiliary:
            auxiliary.follow("old", self._objective.old_decay(self.config.algorithm, update))
        if step == 0:
            self._loss.end_update(self._progress)
        else:
            self._loss.end_step()

    @property
    def _progress(self) -> float:
        """Return the completed share of the run's updates."""
        return min(1.0, self.optimizer_steps / (self.config.trainer.updates * self.config.trainer.steps_per_update))

    def discard(self) -> None:
        """Discard all gradients and metrics accumulated since the last step."""
        self._waiting = []
        self._model.discard()
        self._metrics.clear()
        if self._flops is not None:
            self._flops.take()
        self._loss.gradient_normaliser()
        self._has_rows = False

    def snapshot(self, version: int, buckets: BucketSet) -> Snapshot | None:
        """Copy this rank's rows of the generating weights into `buckets`, as its part of a version.

        These are the current weights, or the old policy's if the objective has an old policy. Returns None on ranks
        that hold a further copy of the weights.

        Payload `full`: every parameter that is not frozen, in `model.dtype` under its diffusers name, adapters merged
        in float32. Payload `lora`: the adapters in float32, with `rank`, `alpha` and `target_modules`; merging them
        gives the `full` payload bit for bit."""
        if self.layout.rank >= self.layout.shard_size:
            return None
        adapters = self._drawing(self._adapters)
        payload, lora = self.config.weights.payload, self.config.model.lora
        if payload == "lora" and lora is not None:
            copy_out(buckets, adapters, {}, 1.0, None, self.layout.rank)
            about = {"rank": lora.rank, "alpha": lora.alpha, "target_modules": list(lora.target_modules)}
        else:
            scale, about = lora.alpha / lora.rank if lora is not None else 1.0, None
            copy_out(buckets, self._drawing(self._base), adapters, scale, self._model.dtype, self.layout.rank)
        return Snapshot(version, payload, buckets.specs, buckets.buckets, about)

    def _drawing(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the old policy's weights if the objective has an old policy, otherwise the given weights."""
        further = self._model.auxiliary.tensors()
        return {name: further.get(f"old.{name}", weight) for name, weight in weights.items()} if further else weights

    def bucket_set(self) -> BucketSet:
        """Allocate memory for snapshots, pinned if the rank uses an accelerator."""
        pinned = self.device.type != "cpu"
        return BucketSet(
            self.config.weights.bucket_mb * 2**20,
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy(),
        )

    def begin_save(self, folder: str | Path) -> tuple[Future[Any], dict[str, Any]]:
        """Copy out the trained parameters, auxiliary policies (reference, old, average) and the optimizer.

        Returns a future, done when this rank's part of them is written, and the further plain values that `load` needs.
        Call it between steps: gradients are not saved."""
        base = {"base_digest": self.digest0, "base_dtype": self.config.model.dtype}
        return self._model.begin_save(Path(folder)), {"optimizer_steps": self.optimizer_steps, **base}

    def load(self, folder: str | Path, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, which any number of ranks may have written.

        `state` has the plain values that `begin_save` returned. Raises TrainingError if the checkpoint is of another
        model, or was trained from other weights."""
        digest = state.get("base_digest")  # None: an earlier version wrote it
        comparable = self.layout.rank == 0 and state.get("base_dtype") == self.config.model.dtype
        if digest is not None and comparable and digest != self.digest0:
            raise TrainingError(
                f"checkpoint {folder}: it was trained from weights of digest {digest}, model.path"
                f" {self.config.model.path} has {self.digest0}; name the model that it was trained from"
            )
        self.discard()
        self._model.load(Path(folder))
        self.optimizer_steps = int(state["optimizer_steps"])
        self._loss.end_update(self._progress)


@torch.no_grad()
def copy_out(
    buckets: BucketSet,
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    scale: float,
    dtype: torch.dtype | None,
    rank: int,
) -> None:
    """Copy this rank's rows of the weights into `buckets`.

    Collective if there are adapters, which are gathered one pair at a time.

    Args:
        buckets: filled in the order of `base`.
        base: stored weights, possibly sharded, by diffusers names.
        adapters: merged into `base` by `merged_weights`; may be empty.
        scale: factor of the adapters' product.
        dtype: dtype of the copies; None: each weight's own.
        rank: this rank."""
    rows = merged_weights(
        base,
        adapters,
        scale,
        load=lambda stored: own_rows(stored, rank),
        load_adapter=whole,
        rows=lambda product, stored: rows_like(product, stored, rank),
    )
    buckets.fill(rows, dtype, base)
