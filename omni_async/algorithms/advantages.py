"""Turns rewards into group-relative advantages: (r - group mean) / (std + eps), clamped. float64 inside.

Groups are whole here, before any batching: a group's mean over part of its samples would be a different algorithm.
Group membership is an integer id, never the prompt's text, because a prompt may occur twice in an update.

Public references differ in the std: VeRL-Omni uses ddof 1 and flow_grpo ddof 0, both add 1e-4 to it; Flow-Factory
uses ddof 0 and max(std, 1e-6); "none" is Dr. GRPO (arXiv 2503.20783). A group of one gets 0 here, as in VeRL-Omni's
diffusion code (VeRL's token code would give it the raw reward).

`advantage.aggregate` combines several scorers, with rewards (N, K) and an unnormalised weight per scorer:

  rewards     r = sum_k w_k r_k, then the advantages of r (VeRL-Omni, Flow-Factory's `sum`, MixGRPO's `reward_aggr`)
  advantages  A_k of each scorer alone, A = sum_k w_k A_k (MixGRPO's `advantage_aggr`): with a std, scorers count
              by weight, not by scale
  gdpo        A_k divided by the group's std for every `std`, A = sum_k w_k A_k, whitened over the
              update (GDPO, arXiv 2601.05242)

`advantage.form` may replace the signed advantages by weights, after they are combined and before the clamp: see
`formed`.

The clamp is applied once, at the end. If ddof and eps occur twice, in A_k and in whitening, both use the same settings.
`RewardHistory` replaces groups if statistics cover a prompt's whole run.

Streaming: with std="global" an objective that is positively homogeneous in the advantage may accumulate gradients with
`centred` rewards as groups arrive and multiply the sum by `global_scale` at the end, unless the clamp binds
(`clip_binds`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from omni_async.config.algorithm import Advantage


def aggregate_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    settings: Advantage,
    history: RewardHistory | None = None,
    prompt_ids: Tensor | None = None,
) -> Tensor:
    """Return advantages (N,) in rewards' dtype, float64 inside, in the settings' form.

    Signed ones of groups of one are 0, as is that of a prompt's only reward.

    Args:
        rewards: (N, K) finite, of K scorers. A scorer without a part in a group's reward has NaN in the group's whole
            column; it then adds nothing, and does not count in a std. Not allowed with settings.track_prompts.
        weights: (K,), a weight per scorer.
        group_ids: (N,) integers in any order.
        settings: `algorithm.advantage`.
        history: With settings.track_prompts it and `prompt_ids` replace groups, so that groups of the same prompt share
            statistics. It is only read: commit `tracked_rewards` to it after the update.
        prompt_ids: (N,) integers, read only with settings.track_prompts."""
    if not settings.clip_max > 0:
        raise ValueError(f"clip_max must be > 0, got {settings.clip_max}")
    columns = tracked_rewards(rewards, weights, settings)
    each = msgspec.structs.replace(settings, std="group") if settings.aggregate == "gdpo" else settings
    if not settings.track_prompts:
        of_groups = [_where_given(column, group_ids, each) for column in columns.unbind(1)]
        advantages = _weighted(torch.stack(of_groups, dim=1), weights, settings)
        if settings.aggregate == "gdpo":
            # Every group sums to 0, so the update's mean is 0 except for rounding. It is not subtracted, so that groups
            # without a signal stay exactly 0.
            advantages = advantages * global_scale(advantages, settings)
    elif history is None or prompt_ids is None:
        raise ValueError("advantage.track_prompts needs a history and prompt_ids")
    else:
        advantages = _weighted(history.advantages(columns, prompt_ids, each), weights, settings)
        if settings.aggregate == "gdpo":
            whitened = (advantages - advantages.mean()) * global_scale(advantages, settings)
            advantages = whitened.masked_fill(_without_peers(prompt_ids, history), 0.0)
    advantages = formed(advantages, group_ids, settings)
    return advantages.clamp(-settings.clip_max, settings.clip_max).to(rewards.dtype)


def formed(advantages: Tensor, group_ids: Tensor, settings: Advantage) -> Tensor:
    """Return advantages (N,) in the settings' `form`, float64. Weights have mean 1 in every group.

    Args:
        advantages: signed ones A (N,), float64.
        group_ids: (N,) integers in any order.
        settings: `algorithm.advantage`. With K the size of a group, `reward_weighted`: K softmax(A / temperature) over
            the group, the weights of reward-weighted regression (DDPO's RWR, arXiv 2305.13301, sec. 4.2). `best_of_n`:
            K / best for the `best` largest A of the group, of equal ones the first, and 0 for the others; the loss is
            then the mean over these samples, as in RAFT (arXiv 2304.06767, alg. 1). `standardised`: A."""
    if settings.form == "standardised":
        return advantages
    weights = torch.zeros_like(advantages)
    for group in sorted(set(group_ids.tolist())):
        members = (group_ids == group).nonzero().flatten()
        own = advantages[members]
        if settings.form == "reward_weighted":
            weights[members] = len(own) * (own / settings.temperature).softmax(dim=0)
        else:
            best = own.sort(descending=True, stable=True).indices[: settings.best]
            weights[members[best]] = len(own) / len(best)
    return weights


def _where_given(rewards: Tensor, group_ids: Tensor, settings: Advantage) -> Tensor:
    """Return advantages (N,) of one scorer's rewards (N,); 0 for NaN."""
    _check_ids("group_ids", group_ids, rewards.shape)
    given = rewards.isnan().logical_not()
    advantages = torch.zeros_like(rewards)
    if given.any():
        advantages[given] = unclipped_advantages(rewards[given], group_ids[given], settings)
    return advantages


def tracked_rewards(rewards: Tensor, weights: Tensor, settings: Advantage) -> Tensor:
    """Return the input columns of advantages, float64; a `RewardHistory` stores the same columns.

    Args:
        rewards: (N, K), of K scorers.
        weights: (K,), a weight per scorer.
        settings: `algorithm.advantage`.

    Returns:
        (N, 1), the weighted sum, with aggregate="rewards"; the scorers' own (N, K) otherwise.

    Raises:
        ValueError: there are no rewards, or a shape does not fit."""
    if rewards.ndim != 2 or rewards.numel() == 0 or weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"expected rewards (N, K) and weights (K,), got {tuple(rewards.shape)} and {tuple(weights.shape)}"
        )
    columns = rewards.detach().to(torch.float64)
    if settings.aggregate != "rewards":
        return columns
    total = torch.zeros(len(columns), dtype=torch.float64)
    # In this order the sum equals `Score.value` bit for bit.
    for weight, column in zip(weights.tolist(), columns.unbind(1), strict=True):
        total = total + weight * column
    return total.unsqueeze(1)


def _weighted(advantages: Tensor, weights: Tensor, settings: Advantage) -> Tensor:
    """Return (N,) from (N, C); with aggregate="rewards" the rewards already include the weights."""
    return advantages[:, 0] if settings.aggregate == "rewards" else advantages @ weights.to(torch.float64)


def _without_peers(prompt_ids: Tensor, history: RewardHistory) -> Tensor:
    """Return (N,) bool: True for the only reward of its prompt, which has nothing to compare with."""
    rewards = Counter(prompt_ids.tolist())
    return torch.tensor([rewards[prompt] + history.count(prompt) == 1 for prompt in prompt_ids.tolist()])


def unclipped_advantages(rewards: Tensor, group_ids: Tensor, settings: Advantage) -> Tensor:
    """Return advantages (N,) float64 before the clamp. Equal rewards of a group give exactly 0.

    Args:
        rewards: (N,) finite.
        group_ids: (N,) integers in any order.
        settings: `algorithm.advantage`. std "global" divides by the std of all N rewards, "group" by the group's std,
            "none" does not divide; ddof (0 or 1) is subtracted from the count in the variance.

    Raises:
        ValueError: an argument does not fit this description."""
    if settings.std not in ("global", "group", "none"):
        raise ValueError(f"std must be 'global', 'group' or 'none', got {settings.std!r}")
    _check_ids("group_ids", group_ids, rewards.shape)
    values = _finite64(rewards)
    whole = global_scale(values, settings) if settings.std == "global" else 1.0
    advantages = torch.empty_like(values)
    for group in sorted(set(group_ids.tolist())):
        members = group_ids == group
        own = values[members]
        scale = global_scale(own, settings) if settings.std == "group" else whole
        advantages[members] = centred(own) * scale
    return advantages


def clip_binds(rewards: Tensor, group_ids: Tensor, settings: Advantage) -> bool:
    """Return whether the clamp to +-clip_max changes any of these advantages.

    Args:
        rewards, group_ids, settings: as in `unclipped_advantages`, with its errors."""
    return bool((unclipped_advantages(rewards, group_ids, settings).abs() > settings.clip_max).any())


def centred(rewards: Tensor) -> Tensor:
    """Subtract the mean from the rewards (K,) of one group, in float64; exact zeros if all are equal."""
    values = _finite64(rewards)
    if values.max() == values.min():
        return torch.zeros_like(values)
    return values - values.mean()


def global_scale(rewards: Tensor, settings: Advantage) -> float:
    """Return the factor for an update's rewards (N,) with std="global": `inverse_std` of their std (of 1 if N = 1)."""
    values = _finite64(rewards)
    if settings.ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {settings.ddof}")
    if len(values) == 1:
        deviation = 1.0
    elif values.max() == values.min():
        deviation = 0.0
    else:
        deviation = float(values.std(correction=settings.ddof))
    return inverse_std(deviation, settings)


def inverse_std(deviation: float, settings: Advantage) -> float:
    """Return 1 / (deviation + eps) with eps_form "added", 1 / max(deviation, eps) with "floor"; 0 instead of 1 / 0."""
    eps, form = settings.eps, settings.eps_form
    if eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if form not in ("added", "floor"):
        raise ValueError(f"eps_form must be 'added' or 'floor', got {form!r}")
    divisor = deviation + eps if form == "added" else max(deviation, eps)
    return 1 / divisor if divisor > 0 else 0.0


def _check_ids(name: str, ids: Tensor, shape: torch.Size) -> None:
    if ids.is_floating_point() or ids.shape != shape:
        raise ValueError(
            f"{name} must be integers of shape {tuple(shape)}, got {ids.dtype} of shape {tuple(ids.shape)}"
        )


def _finite64(rewards: Tensor) -> Tensor:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().to(torch.float64)
    if not values.isfinite().all():
        position = int(values.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"rewards must be finite, got {values[position].item()} at position {position}")
    return values


def best_and_worst(rewards: Sequence[float]) -> tuple[int, int]:
    """Return the positions of the best and the worst reward, two different samples; of equal rewards the first.

    Raises ValueError for fewer than two rewards, which make no pair."""
    if len(rewards) < 2:
        raise ValueError(f"a preference pair needs at least 2 samples of a prompt, got {len(rewards)}")
    best = max(range(len(rewards)), key=lambda i: rewards[i])
    worst = min((i for i in range(len(rewards)) if i != best), key=lambda i: rewards[i])
    return best, worst


@dataclass(frozen=True)
class _Moments:
    """Count, mean and M2 of one prompt's rewards. `mean` and `m2` are (C,) float64, a number per column of rewards."""

    count: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, rewards: Tensor) -> _Moments:
        """Compute the moments of rewards (n, C). A column of equal rewards gets exactly that mean, and M2 = 0."""
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
    """Every prompt's rewards over a run, for advantages against all of them instead of this update's alone.

    The mean (and with std="group" the std) is over every reward of the prompt so far, including this update; with
    std="global" the std is over this update's rewards alone. flow_grpo's PerPromptStatTracker computes the same if it
    is never cleared. Prompts are distinguished by index, never by text. Per prompt only count, mean and M2 = sum of
    squared deviations are stored, merged as in Chan, Golub and LeVeque (1979). Computing advantages changes nothing.
    Only `commit` does, called after an update, so an abandoned update leaves no trace.

    Rewards are (N,) or, for several scorers, columns (N, C), always with the same C; prompt_ids are integers (N,)."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Moments] = {}

    def count(self, prompt: int) -> int:
        """Return the number of committed rewards of this prompt."""
        return self._prompts[prompt].count if prompt in self._prompts else 0

    def advantages(self, rewards: Tensor, prompt_ids: Tensor, settings: Advantage) -> Tensor:
        """Return advantages, float64 in the shape of `rewards`, each column against its own statistics, not clamped.

        A prompt's only reward so far gets 0.

        Args:
            rewards: this update's rewards, not committed yet.
            prompt_ids: the prompt of each.
            settings: `algorithm.advantage`.

        Raises:
            ValueError: a shape does not fit, a reward is not finite, or C differs from the rewards so far."""
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
        """Add the rewards of an update that was applied."""
        self._prompts.update(self._merged(self._checked(rewards, prompt_ids), prompt_ids))

    def state(self) -> dict[str, list[float]]:
        """Return JSON values: prompt index -> [count, means..., M2s...]."""
        return {str(prompt): [m.count, *m.mean.tolist(), *m.m2.tolist()] for prompt, m in sorted(self._prompts.items())}

    @classmethod
    def from_state(cls, state: dict[str, list[float]]) -> RewardHistory:
        """Restore a history from `state`. Raises ValueError with the first invalid entry."""
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
        _check_ids("prompt_ids", prompt_ids, rewards.shape[:1])
        columns = rewards.detach().to(torch.float64).reshape(len(rewards), -1)
        if not columns.isfinite().all():
            row = int(columns.isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(f"rewards must be finite, got {columns[row].tolist()} at position {row}")
        known = next(iter(self._prompts.values()), None)
        if known is not None and len(known.mean) != columns.shape[1]:
            raise ValueError(f"the history has {len(known.mean)} columns of rewards, got {columns.shape[1]}")
        return columns
