"""Builds rows of transition objectives: one row is one trained denoising step of one sample.

Sample-major: (sample 0, step 0), (sample 0, step 1), ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.timesteps import num_trained
from omni_async.policy import Policy
from omni_async.training.groups import GroupBatch
from omni_async.training.micro_batches import MicroBatch, Needs


@dataclass(frozen=True)
class TransitionRows:
    """R rows on the trainer's device, float32.

    Latents, next_latents and behaviour_mean (R, *shape), all other tensors (R,). `steps`, `row_ids`, each (sample,
    number among the sample's trained rows), and `needs` stay on the host."""

    latents: Tensor
    next_latents: Tensor
    behaviour_mean: Tensor | None
    behaviour_log_prob: Tensor
    advantage: Tensor
    staleness: Tensor
    weight: Tensor | None
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    conditioning: TensorDict
    steps: list[int]
    row_ids: list[tuple[int, int]]
    needs: Needs

    @property
    def num_elements(self) -> int:
        """Return the number of latent elements of a row."""
        return self.latents[0].numel()


def trained_steps(seed: int, window: int, fraction: float) -> list[int]:
    """Return the window positions that are trained.

    `num_trained` of them without replacement, a draw of the sample's own; or all, in order."""
    count = num_trained(window, fraction)
    if count == window:
        return list(range(window))
    return torch.randperm(window, generator=torch.Generator().manual_seed(seed))[:count].sort().values.tolist()


def build_rows(
    group: GroupBatch,
    chosen: Sequence[Sequence[int]],
    batch: MicroBatch,
    needs: Sequence[str],
    policy: Policy,
    device: torch.device,
) -> TransitionRows:
    """Build a micro-batch of a checked group.

    `chosen[i]` are the window positions trained of sample i, as many for every sample, and `needs` the components of
    all its rows."""
    row_ids = [divmod(i, len(chosen[0])) for i in batch.rows]
    pairs = [(sample, chosen[sample][n]) for sample, n in row_ids]
    trajectories = [group.trajectories[sample] for sample, _ in pairs]
    steps = [int(t["steps"][k]) for t, (_, k) in zip(trajectories, pairs, strict=True)]

    def stacked(name: str, shift: int = 0) -> Tensor:
        return torch.stack([t[name][k + shift] for t, (_, k) in zip(trajectories, pairs, strict=True)]).to(device)

    def sigma(position: list[int]) -> Tensor:
        return torch.stack([t["sigmas"][i] for t, i in zip(trajectories, position, strict=True)]).to(device)

    weight = None
    if group.weights is not None:
        weight = torch.tensor([group.weights[sample][n] for sample, n in row_ids], dtype=torch.float64, device=device)
    return TransitionRows(
        latents=stacked("latents"),
        next_latents=stacked("latents", 1),
        behaviour_mean=stacked("means") if "means" in trajectories[0] else None,
        behaviour_log_prob=stacked("log_probs"),
        advantage=torch.tensor([group.advantages[sample] for sample, _ in pairs], dtype=torch.float32, device=device),
        staleness=torch.tensor([group.staleness[sample][k] for sample, k in pairs], dtype=torch.int64, device=device),
        weight=weight,
        sigma=sigma(steps),
        sigma_next=sigma([i + 1 for i in steps]),
        sigma_max=sigma([1] * len(steps)),
        conditioning=policy.stack_conditioning([t["conditioning"] for t in trajectories]).to(device),
        steps=steps,
        row_ids=row_ids,
        needs=Needs([needs[i] for i in batch.rows], batch.calls),
    )
