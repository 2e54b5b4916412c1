"""Builds rows of forward-process objectives: one row is one noise draw of one sample's final latents.

The order is sample-major, (sample 0, draw 0), (sample 0, draw 1), ...; for preference pairs (winner, draw 0), (loser,
draw 0), (winner, draw 1), ... A sample's sigmas and noises come from its seed alone, whatever the micro-batches and
ranks; the two samples of a pair have the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.forward_process import draw_sigmas
from omni_async.config.algorithm import Forward
from omni_async.policy import Policy
from omni_async.training.groups import GroupBatch
from omni_async.training.micro_batches import Needs


@dataclass(frozen=True)
class ForwardRows:
    """R rows on the trainer's device: final, noise (R, *shape) and sigma, advantage (R,) float32.

    Staleness (R,) int64, the largest of the sample's steps."""

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

    def taken(self, numbers: range) -> Draws:
        """Return the draws with these numbers."""
        return Draws(self.sigmas[list(numbers)], self.noises[list(numbers)])


def make_draws(seed: int, shape: tuple[int, ...], sigmas: Tensor, forward: Forward, fraction: float) -> Draws:
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_sigmas(sigmas, forward, fraction, generator).to(torch.float32)
    return Draws(drawn, torch.randn((len(drawn), *shape), generator=generator))


def build_rows(
    group: GroupBatch,
    draws: Sequence[Draws],
    row_ids: Sequence[tuple[int, int]],
    needs: Needs,
    policy: Policy,
    device: torch.device,
) -> ForwardRows:
    """Build the rows `row_ids`, each (sample, draw), of a checked group.

    `draws[i]` are sample i's, as many for every sample."""
    trajectories = [group.trajectories[sample] for sample, _ in row_ids]
    return ForwardRows(
        final=torch.stack([t["final"] for t in trajectories]).to(device),
        noise=torch.stack([draws[sample].noises[k] for sample, k in row_ids]).to(device),
        sigma=torch.stack([draws[sample].sigmas[k] for sample, k in row_ids]).to(device),
        advantage=torch.tensor([group.advantages[sample] for sample, _ in row_ids], dtype=torch.float32, device=device),
        staleness=torch.tensor(
            [max(group.staleness[sample], default=0) for sample, _ in row_ids], dtype=torch.int64, device=device
        ),
        conditioning=policy.stack_conditioning([t["conditioning"] for t in trajectories]).to(device),
        needs=needs,
    )
