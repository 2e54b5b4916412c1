"""Makes policy updates: accumulates gradients of groups while other groups are generated, and steps the optimizer."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from omni_async.algorithms.advantages import (
    RewardHistory,
    aggregate_advantages,
    best_and_worst,
    centred,
    clip_binds,
    global_scale,
    tracked_rewards,
)
from omni_async.algorithms.correction import Corrected, Drift, correct, loss_factor, normaliser, padded
from omni_async.algorithms.mismatch import AutomaticCorrection
from omni_async.algorithms.token_mean import counted
from omni_async.checkpoint.statement import plain, value_at
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.control.reward_formula import RewardFormula
from omni_async.control.seeds import derive
from omni_async.roles.api import Abandoned, RankApi, Tracer
from omni_async.roles.plan import Plan, plan_updates
from omni_async.types import ReadyGroup, ReadySample, SampleDrift, TrainGroup

Weights = Sequence[Sequence[float]]  # by sample and trained step

# Keys that decide how far engine and trainer round apart, and which rows are clipped.
_ROUNDING = (
    *("model.dtype", "rollout.engine", "rollout.attention_backend", "rollout.compile", "rollout.sde"),
    *("rollout.sampling", "rollout.buckets", "rollout.num_inference_steps"),
    *(f"algorithm.{key}" for key in ("clip_range", "clip_range_nats", "clip_centre", "dual_clip", "dppo", "guard")),
)
# Keys that decide how far the policy moves before a sample is trained on.
_DRIFT = ("staleness", "trainer.optimizer.lr", "trainer.streaming")


@dataclass(eq=False)
class PolicyGradient:
    """An `UpdateRule` that updates by gradients on the ranks.

    With `algorithm.correction.mode: auto` finished updates decide about the correction of later ones. The decision is
    part of the state: a resumed run keeps it, unless its recipe changes a key that the decision depends on. A decision
    for rounding depends on fewer keys than one for drift."""

    config: Config
    plan: Plan
    ranks: Sequence[RankApi]

    def __post_init__(self) -> None:
        self._history = RewardHistory()
        auto = self.plan.ratio and self.config.algorithm.correction.mode == "auto"
        # Tempered weights need the whole update, which `streaming: on` rules out.
        self._auto = AutomaticCorrection(self.config.trainer.streaming != "on") if auto else None

    def begin(self, version: int, tracer: Tracer, preempt: Callable[[], bool] = lambda: False) -> Update:
        left_bypass = self._auto is not None and self._auto.reason is not None
        return Update(self.config, self.plan, self.ranks, tracer, version, self._history, preempt, left_bypass)

    def learn(self, metrics: dict[str, float]) -> str | None:
        if self._auto is None:
            return None
        message = self._auto.learn(metrics)
        self._plan_by(self._auto)
        return message

    def _plan_by(self, auto: AutomaticCorrection) -> None:
        if auto.reason is not None:
            self.config = replace(self.config, algorithm=replace(self.config.algorithm, correction=auto.correction))
            self.plan = plan_updates(self.config)

    def state(self) -> dict[str, Any]:
        tracked = self.config.algorithm.advantage.track_prompts
        history = {"reward_history": self._history.state()} if tracked else {}
        return history if self._auto is None else history | {"auto": self._auto.state(), "auto_of": self._measured}

    def restore(self, state: dict[str, Any]) -> None:
        self._history = RewardHistory.from_state(state.get("reward_history", {}))
        before = state.get("auto_of", {})
        changed = {key for key, value in self._measured.items() if key not in before or before[key] != value}
        if self._auto is not None and changed.isdisjoint(_ROUNDING):
            self._auto.restore(state["auto"], drift=not changed)
            self._plan_by(self._auto)

    @property
    def _measured(self) -> dict[str, Any]:
        """The keys that the decision depends on, with their values."""
        recipe = plain(self.config)
        return {key: value_at(recipe, key) for key in (*_ROUNDING, *_DRIFT)}


@dataclass(eq=False)
class Update:
    """The groups of one update, and the calls that train on them. Pass it groups with `add`, then call `finish`."""

    config: Config
    plan: Plan
    ranks: Sequence[RankApi]
    tracer: Tracer
    version: int
    history: RewardHistory
    preempt: Callable[[], bool] = lambda: False
    proximal_ratio: bool = False

    def __post_init__(self) -> None:
        self._layout = ParallelLayout.of(self.config.trainer)
        self._advantage = self.config.algorithm.advantage
        self._groups_per_step = self.config.trainer.groups_per_update // self.config.trainer.steps_per_update
        self._row_weight = 1.0 / (self._groups_per_step * self.plan.samples_per_group * self.plan.rows_per_sample)
        self._drifts: list[list[SampleDrift]] = []
        self._step_metrics: list[dict[str, float]] = []
        self.groups: list[ReadyGroup] = []

    @property
    def missing(self) -> int:
        """Return the number of missing groups."""
        return self.config.trainer.groups_per_update - len(self.groups)

    async def add(self, group: ReadyGroup) -> None:
        """Compute with a group as early as the plan allows. Raises ObjectLost, with nothing changed, if it is gone."""
        trajectories = tuple(sample.trajectory for sample in self._chosen(group))
        start = len(self.groups) * self.plan.samples_per_group
        await asyncio.gather(*(rank.fetch(group.group, trajectories, start) for rank in self.ranks))
        self.groups.append(group)
        if self.plan.proximal:
            await self._recompute_proximal(group, start)
        if self.plan.mode == "as_ready":
            await self._accumulate(group, self._advantages([group])[0])
        elif self.plan.mode == "unscaled":
            await self._accumulate(group, centred(_doubles(group.rewards)).tolist())

    async def finish(self) -> dict[str, float]:
        """Compute the rest once all groups are in, and return the metrics of the update."""
        extra: dict[str, float] = {}
        if self.plan.mode == "as_ready":
            await self._step()
        elif self.plan.mode == "unscaled":
            rewards = self._rewards(self.groups)[0][:, 0]
            if clip_binds(rewards, _group_ids(self.groups), self._advantage):
                await asyncio.gather(*(rank.discard() for rank in self.ranks))
                extra = await self._train_collected()
            else:
                await self._step(global_scale(rewards, self._advantage))
        else:
            extra = await self._train_collected()
        if self._advantage.track_prompts and not self.plan.paired:
            rewards, weights = self._rewards(self.groups)
            self.history.commit(_prompt_ids(self.groups), tracked_rewards(rewards, weights, self._advantage))
        left = {"proximal_ratio": 1.0} if self.proximal_ratio else {}
        return merged_metrics(self._step_metrics) | extra | left

    async def _train_collected(self) -> dict[str, float]:
        weights, extra = self._weights() if self.plan.weigh else ([None] * len(self.groups), {})
        given = zip(self.groups, self._advantages(self.groups), weights, strict=True)
        for number, (group, advantages, group_weights) in enumerate(given, start=1):
            if self.preempt() and not self._step_metrics:
                raise Abandoned
            await self._accumulate(group, advantages, group_weights)
            if number % self._groups_per_step == 0:
                await self._step()
        return extra

    def _weights(self) -> tuple[list[Weights | None], dict[str, float]]:
        """Return weights of every group's samples and steps, computed over all groups, and the correction's metrics."""
        correction = self.config.correction
        drifts = [drift for group in self._drifts for drift in group]
        first = drifts[0].num_elements
        # `correct` divides by one number of elements, but samples of other buckets have other numbers.
        shares = [first / d.num_elements if correction.log_ratio == "mean" else 1.0 for d in drifts]
        log_ratios = [_column(d.log_ratio) * share for d, share in zip(drifts, shares, strict=True)]
        lengths = torch.tensor([len(row) for row in log_ratios])
        log_ratio, valid = padded(torch.cat(log_ratios), lengths)
        kappas = [_column(d.kappa) for d in drifts if d.kappa is not None]
        kappa = padded(torch.cat(kappas), lengths)[0] if len(kappas) == len(drifts) else None
        steps = padded(torch.cat([_column(d.steps, np.int64) for d in drifts]), lengths)[0]
        corrected = correct(Drift(log_ratio, kappa, steps, valid), correction, first)
        factor = loss_factor(*self._counted(corrected, lengths))
        weighted = zip((corrected.weight * factor).numpy(), lengths.tolist(), strict=True)
        weights = [array("d", row[:n].tobytes()) for row, n in weighted]  # sent as bytes
        found = {"gamma": corrected.gamma[valid].mean().item()}
        if correction.tempering == "step":
            found |= {f"gamma/step_{k:02d}": corrected.gamma[steps == k][0].item() for k in steps.unique().tolist()}
        for name, values in corrected.metrics().items():
            found[name] = (values.max() if name.endswith("/max") else values.mean()).item()
        return _in_groups(weights, self.plan.samples_per_group), found

    def _counted(self, corrected: Corrected, lengths: Tensor) -> tuple[float, float]:
        """Return what the loss is averaged over, before and after the correction."""
        if not self.plan.draws_tokens:
            return normaliser(corrected, self.config.correction)
        specs, algorithm = self.config.rollout.specs, self.config.algorithm
        most = torch.tensor([specs[group.bucket].most_tokens for group in self.groups for _ in self._chosen(group)])
        return counted(algorithm.answers, self.config.correction, lengths, most, corrected)

    # ---- rewards -----------------------------------------------------------------------------------------------------

    def _rewards(self, groups: list[ReadyGroup]) -> tuple[Tensor, Tensor]:
        """Return (N, K) rewards, a column per scorer or component, and the weights (K,); NaN: reward left out."""
        if self._advantage.aggregate == "rewards":
            return _doubles([[r] for group in groups for r in group.rewards]), _doubles([1.0])
        values = [sample.score.values for group in groups for sample in group.samples]
        rewards = [[math.nan if value is None else value for value in row] for row in values]
        return _doubles(rewards), _doubles(RewardFormula(self.config.reward).weights)

    def _advantages(self, groups: list[ReadyGroup]) -> list[list[float]]:
        if self.plan.paired:
            return [[1.0, -1.0] for _ in groups]
        flat = aggregate_advantages(
            *self._rewards(groups), _group_ids(groups), self._advantage, self.history, _prompt_ids(groups)
        )
        return _in_groups(flat.tolist(), len(groups[0].samples))

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def _batch(self, group: ReadyGroup, advantages: Sequence[float]) -> TrainGroup:
        samples = self._chosen(group)
        names = [group.group if self.plan.paired else sample.sample_id for sample in samples]
        return TrainGroup(
            group=group.group,
            version=self.version,
            spec=self.config.rollout.specs[group.bucket],
            advantages=tuple(advantages),
            seeds=tuple(derive("train", self.config.run.seed, str(name)) for name in names),
            step_versions=tuple(sample.step_versions for sample in samples),
            proximal_ratio=self.proximal_ratio,
            prompt=group.prompt if self.plan.draws_tokens else None,
            weighed=self.plan.weigh,
        )

    def _chosen(self, group: ReadyGroup) -> list[ReadySample]:
        """Return the samples that are trained on."""
        return [group.samples[i] for i in best_and_worst(group.rewards)] if self.plan.paired else [*group.samples]

    async def _recompute_proximal(self, group: ReadyGroup, start: int) -> None:
        batch = self._batch(group, [0.0] * self.plan.samples_per_group)
        with self.tracer.span("proximal", version=self.version, group=group.group):
            found = await asyncio.gather(*(rank.recompute_proximal(batch) for rank in self.ranks))
        if self.plan.weigh:
            self._drifts.append(self._layout.in_order(found, self.plan.samples_per_group, start))

    async def _accumulate(self, group: ReadyGroup, advantages: list[float], weights: Weights | None = None) -> None:
        batch = self._batch(group, advantages)
        if weights is not None:
            batch = replace(batch, weights=tuple(weights))
        with self.tracer.span("train", version=self.version, group=group.group):
            await asyncio.gather(*(rank.accumulate(batch, self._row_weight) for rank in self.ranks))

    async def _step(self, grad_scale: float = 1.0) -> None:
        with self.tracer.span("train", version=self.version, step=len(self._step_metrics)):
            metrics = await asyncio.gather(*(rank.step(grad_scale) for rank in self.ranks))
        self._step_metrics.append(metrics[0])


def _doubles(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _column(values: Sequence[float], dtype: type = np.float64) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype))


def _group_ids(groups: list[ReadyGroup]) -> Tensor:
    return torch.tensor([group.group for group in groups for _ in group.samples])


def _prompt_ids(groups: list[ReadyGroup]) -> Tensor:
    return torch.tensor([group.prompt.index for group in groups for _ in group.samples])


def _in_groups(values: list[Any], size: int) -> list[Any]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def merged_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of an update's optimizer steps.

    Takes the maximum of maxima and adds sums up; everything else is averaged over the steps that have it (steps of
    other windows have other metrics per denoising step)."""
    columns: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            columns.setdefault(name, []).append(value)
    return {name: _merged(name, column) for name, column in columns.items()}


def _merged(name: str, column: list[float]) -> float:
    if name.endswith(("/max", "/absmax")):
        return max(column)
    return sum(column) if name.endswith("/sum") else sum(column) / len(column)
