"""Remembers every prompt's rewards over a run, for advantages against all of them instead of this update's alone.

The mean (and with std="group" the std) is over every reward the prompt has had, this update's included; with
std="global" the std is over this update's rewards alone. That is what flow_grpo's PerPromptStatTracker computes when it
is never cleared. Prompts are distinguished by index, never by text. Per prompt only count, mean and M2 = sum of squared
deviations are kept, merged as in Chan, Golub and LeVeque (1979).

Computing advantages changes nothing; `commit`, called when an update is done, does. An abandoned update therefore
leaves no trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.algorithms.advantages import global_scale, inverse_std
from omni_async.config.algorithm import Advantage


@dataclass(frozen=True)
class _Moments:
    """Count, mean and M2 of one prompt's rewards. `mean` and `m2` are (C,) float64, a number per column of rewards."""

    count: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, rewards: Tensor) -> _Moments:
        """Compute the moments of rewards (n, C). Columns of equal rewards get exactly that mean and M2 = 0."""
        mean = torch.where(rewards.amin(0) == rewards.amax(0), rewards[0], rewards.mean(0))
        return cls(len(rewards), mean, (rewards - mean).square().sum(0))

    def merged(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        shift = other.mean - self.mean
        m2 = self.m2 + other.m2 + shift.square() * (self.count * other.count / count)
        return _Moments(count, self.mean + shift * (other.count / count), m2)

    def scales(self, settings: Advantage) -> Tensor:
        """Return (C,): 1 / std in the settings' form of eps."""
        deviations = (self.m2 / max(self.count - settings.ddof, 1)).sqrt().tolist()
        return torch.tensor([inverse_std(deviation, settings) for deviation in deviations], dtype=torch.float64)


class RewardHistory:
    """The moments of every prompt's rewards.

    Rewards come as (N,) or, for several scorers, as columns (N, C), always the same C; prompt_ids are integers (N,)."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Moments] = {}

    def count(self, prompt: int) -> int:
        """Return the number of committed rewards of this prompt."""
        return self._prompts[prompt].count if prompt in self._prompts else 0

    def advantages(self, rewards: Tensor, prompt_ids: Tensor, settings: Advantage) -> Tensor:
        """Return advantages, float64 in the shape of `rewards`, each column against its own statistics, not clamped.

        A prompt's only reward ever gets 0."""
        columns = self._checked(rewards, prompt_ids)
        merged = self._merged(columns, prompt_ids)
        scale = torch.ones(columns.shape[1], dtype=torch.float64)
        if settings.std == "global":
            scale = torch.tensor([global_scale(column, settings) for column in columns.unbind(1)], dtype=torch.float64)
        advantages = torch.empty_like(columns)
        for prompt, moments in merged.items():
            members = prompt_ids == prompt
            own = moments.scales(settings) if settings.std == "group" else scale
            advantages[members] = (columns[members] - moments.mean) * own
        return advantages.reshape(rewards.shape)

    def commit(self, prompt_ids: Tensor, rewards: Tensor) -> None:
        """Remember the rewards of an update that was applied."""
        self._prompts.update(self._merged(self._checked(rewards, prompt_ids), prompt_ids))

    def state(self) -> dict[str, list[float]]:
        """Return JSON values: prompt index -> [count, means..., M2s...]."""
        return {str(prompt): [m.count, *m.mean.tolist(), *m.m2.tolist()] for prompt, m in sorted(self._prompts.items())}

    @classmethod
    def from_state(cls, state: dict[str, list[float]]) -> RewardHistory:
        """Restore a history from `state`. ValueError names the entry that `state` cannot have written."""
        history = cls()
        widths = {len(numbers) for numbers in state.values()}
        for prompt, numbers in state.items():
            columns, rest = divmod(len(numbers) - 1, 2)
            valid = columns >= 1 and rest == 0 and len(widths) == 1 and all(math.isfinite(number) for number in numbers)
            if not valid or numbers[0] < 1 or numbers[0] != int(numbers[0]) or min(numbers[1 + columns :]) < 0:
                raise ValueError(
                    f"reward history of prompt {prompt}: expected [count >= 1, means..., M2s...] like every other, got"
                    f" {numbers}"
                )
            values = torch.tensor(numbers[1:], dtype=torch.float64)
            history._prompts[int(prompt)] = _Moments(int(numbers[0]), values[:columns], values[columns:])
        return history

    def _merged(self, columns: Tensor, prompt_ids: Tensor) -> dict[int, _Moments]:
        """Return the moments of these prompts with these rewards included."""
        merged = {}
        for prompt in sorted(set(prompt_ids.tolist())):
            own = _Moments.of(columns[prompt_ids == prompt])
            merged[prompt] = self._prompts[prompt].merged(own) if prompt in self._prompts else own
        return merged

    def _checked(self, rewards: Tensor, prompt_ids: Tensor) -> Tensor:
        if rewards.ndim not in (1, 2) or rewards.numel() == 0:
            raise ValueError(f"rewards must have shape (N,) or (N, C) with N, C >= 1, got {tuple(rewards.shape)}")
        if prompt_ids.is_floating_point() or prompt_ids.shape != rewards.shape[:1]:
            raise ValueError(
                f"prompt_ids must be integers of shape {tuple(rewards.shape[:1])}, got {prompt_ids.dtype} of shape"
                f" {tuple(prompt_ids.shape)}"
            )
        columns = rewards.detach().to(torch.float64).reshape(len(rewards), -1)
        if not columns.isfinite().all():
            row = int(columns.isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(f"rewards must be finite, got {columns[row].tolist()} at position {row}")
        known = next(iter(self._prompts.values()), None)
        if known is not None and len(known.mean) != columns.shape[1]:
            raise ValueError(f"the history has {len(known.mean)} columns of rewards, got {columns.shape[1]}")
        return columns
