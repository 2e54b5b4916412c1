"""One policy update: prompt groups in, gradients accumulated while later groups are still being made, optimizer steps out.

How far an update may stream is decided once, from the configuration:

  as_ready   advantages need the group alone (std: group or none): each group's backward runs when the group is ready
  unscaled   std: global with an objective that is homogeneous in the advantage: backward runs on reward - group mean, and the gradient is
             multiplied by 1 / (std + eps) when the last group is in. Exact, unless the advantage clip binds, which only the last group
             tells: then the gradients are discarded and the update is computed again from the groups at hand.
  collect    anything else waits for the whole update first
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import torch

from omni_async.actors.api import RankApi
from omni_async.actors.tracer import Tracer
from omni_async.algorithms.advantages import centred, clip_binds, global_scale, group_advantages
from omni_async.algorithms.objectives.base import ObjectiveSettings
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config
from omni_async.types import ReadyGroup

Streaming = Literal["as_ready", "unscaled", "collect"]


def streaming_mode(config: Config) -> tuple[Streaming, str]:
    """The mode and, in words, why."""
    trainer, advantage = config.trainer, config.algorithm.advantage
    if trainer.streaming == "off":
        return "collect", "switched off"
    if trainer.steps_per_update > 1:
        return "collect", "several optimizer steps need the whole update: it is applied whole or, if the run ends, not at all"
    if advantage.std != "global":
        return "as_ready", f"advantage.std: {advantage.std} needs the group alone"
    settings = ObjectiveSettings(clip_range=1.0, kl_coef=config.algorithm.kl_coef, kl_form=config.algorithm.kl_form)
    if not find_objective(config.algorithm.name).homogeneous(settings):
        return "collect", "a global std and a term that does not scale with the advantage (KL) need the whole update"
    return "unscaled", "the objective scales with the advantage, so the global std is applied to the gradient at the end"


class Update:
    """The groups of one update, and the calls that train on them. Give it groups with `add`, then `finish`."""

    def __init__(self, config: Config, ranks: Sequence[RankApi], tracer: Tracer, version: int) -> None:
        self._config = config
        self._ranks = ranks
        self._tracer = tracer
        self._version = version
        self._mode, _ = streaming_mode(config)
        self._groups_per_step = config.trainer.groups_per_update // config.trainer.steps_per_update
        self._row_weight = 1.0 / (self._groups_per_step * config.rollout.group_size * config.rollout.sde.window.size)
        self._step_metrics: list[dict[str, float]] = []
        self.groups: list[ReadyGroup] = []

    @property
    def places(self) -> int:
        """Groups still missing."""
        return self._config.trainer.groups_per_update - len(self.groups)

    async def add(self, group: ReadyGroup) -> None:
        self.groups.append(group)
        if self._mode == "as_ready":
            await self._accumulate(group, self._advantages([group])[0])
        elif self._mode == "unscaled":
            await self._accumulate(group, centred(torch.tensor(group.rewards, dtype=torch.float64)).tolist())

    async def finish(self) -> dict[str, float]:
        """All groups are in: whatever is left to compute, and the metrics of the update."""
        if self._mode == "as_ready":
            await self._step()
        elif self._mode == "unscaled" and not self._clip_binds():
            rewards = torch.tensor([r for group in self.groups for r in group.rewards], dtype=torch.float64)
            advantage = self._config.algorithm.advantage
            await self._step(global_scale(rewards, ddof=advantage.ddof, eps=advantage.eps))
        else:
            if self._mode == "unscaled":
                await asyncio.gather(*(rank.discard() for rank in self._ranks))
            for number, (group, advantages) in enumerate(zip(self.groups, self._advantages(self.groups), strict=True), start=1):
                await self._accumulate(group, advantages)
                if number % self._groups_per_step == 0:
                    await self._step()
        # Steps of other windows have other metrics per denoising step: each is averaged over the optimizer steps that have it.
        values: dict[str, list[float]] = {}
        for metrics in self._step_metrics:
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(column) / len(column) for name, column in values.items()}

    def _batch(self, groups: list[ReadyGroup]) -> dict[str, Any]:
        rewards = [r for group in groups for r in group.rewards]
        ids = [group.group for group in groups for _ in group.rewards]
        advantage = self._config.algorithm.advantage
        return {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group_ids": torch.tensor(ids),
            "std": advantage.std,
            "ddof": advantage.ddof,
            "eps": advantage.eps,
            "clip_max": advantage.clip_max,
        }

    def _advantages(self, groups: list[ReadyGroup]) -> list[list[float]]:
        flat = group_advantages(**self._batch(groups)).tolist()
        size = len(groups[0].samples)
        return [flat[i : i + size] for i in range(0, len(flat), size)]

    def _clip_binds(self) -> bool:
        return clip_binds(**self._batch(self.groups))

    async def _accumulate(self, group: ReadyGroup, advantages: list[float]) -> None:
        references = [sample.trajectory for sample in group.samples]
        with self._tracer.span("train", version=self._version, group=group.group):
            await asyncio.gather(*(rank.accumulate(references, advantages, self._row_weight) for rank in self._ranks))

    async def _step(self, grad_scale: float = 1.0) -> None:
        with self._tracer.span("train", version=self._version, step=len(self._step_metrics)):
            metrics = await asyncio.gather(*(rank.step(grad_scale) for rank in self._ranks))
        self._step_metrics.append(metrics[0])
