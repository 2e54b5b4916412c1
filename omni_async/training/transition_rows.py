"""Builds rows of trained denoising steps: chooses the steps of a sample, and puts the inputs of a loss on the device.

Rows are sample-major, (sample 0, step 0), (sample 0, step 1), ...; a sample of several calls has the steps of all
calls, one call after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.algorithms.kinds import num_trained
from omni_async.diffusion.policy import Policy
from omni_async.diffusion.sde.noise import generator_of
from omni_async.training.device import send
from omni_async.training.groups import GroupBatch, MicroBatch, Needs, find_step


@dataclass(frozen=True)
class TransitionRows:
    """R rows on the trainer's device, float32 except for log-probs and weights (float64) and staleness (int64).

    latents, next_latents and behaviour_mean (R, *shape), behaviour_by_modality (R, M), all other tensors (R,). Four
    fields stay on the host: `steps`; `fresh`, the numbers of rows of staleness 0; `row_ids`, each (sample, number among
    the sample's trained rows); and `needs`."""

    latents: Tensor
    next_latents: Tensor
    behaviour_mean: Tensor | None
    behaviour_log_prob: Tensor
    behaviour_by_modality: Tensor | None
    advantage: Tensor
    staleness: Tensor
    weight: Tensor | None
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    conditioning: TensorDict
    steps: list[int]
    fresh: list[int]
    row_ids: list[tuple[int, int]]
    needs: Needs

    @property
    def num_elements(self) -> int:
        return self.latents[0].numel()


def trained_steps(seed: int, window: int, fraction: float, calls: int = 1) -> list[int]:
    """Return the positions of a sample's trained steps, in order: `num_trained` of every call.

    Args:
        seed: the sample's, for the draw.
        window: W, the number of a call's trainable steps; the steps of call k have positions k W, k W + 1, ...
        fraction: `algorithm.timestep_fraction`.
        calls: the sample's number of calls."""
    count = num_trained(window, fraction)
    if count == window:
        return list(range(calls * window))
    generator = generator_of(seed, "trained steps")
    drawn = [sorted(generator.permutation(window)[:count].tolist()) for _ in range(calls)]
    return [call * window + k for call, positions in enumerate(drawn) for k in positions]


def build_rows(
    group: GroupBatch,
    chosen: Sequence[Sequence[int]],
    batch: MicroBatch,
    needs: Sequence[str],
    policy: Policy,
    device: torch.device,
) -> TransitionRows:
    """Build a micro-batch of a group.

    Args:
        group: this rank's samples, checked.
        chosen: the trained window positions of each sample, equally many for every sample.
        batch: the rows to build, by their number in the group.
        needs: the component of every row of the group.
        policy: stacks the conditioning.
        device: the device of the rows."""
    row_ids = [divmod(i, len(chosen[0])) for i in batch.rows]
    pairs = [(sample, chosen[sample][n]) for sample, n in row_ids]
    found = [find_step(group.trajectories[sample], position) for sample, position in pairs]
    steps = [int(t["steps"][k]) for t, k in found]

    def stacked(name: str, shift: int = 0) -> Tensor:
        return send(torch.stack([t[name][k + shift] for t, k in found]), device)

    # Checked: all trajectories have the same schedule.
    schedule, indices = found[0][0]["sigmas"], torch.tensor(steps)
    # The rows of a call share its conditioning, which is stacked once.
    calls = {id(t): t for t, _ in found}
    numbers_of_calls = {call: number for number, call in enumerate(calls)}
    conditioning = policy.stack_conditioning([t["conditioning"] for t in calls.values()])

    def numbers(values: list[Any], dtype: torch.dtype) -> Tensor:
        return send(torch.tensor(values, dtype=dtype), device)

    weight = None
    if group.weights is not None:
        weight = numbers([group.weights[sample][n] for sample, n in row_ids], torch.float64)
    return TransitionRows(
        latents=stacked("latents"),
        next_latents=stacked("latents", 1),
        behaviour_mean=stacked("means") if "means" in found[0][0] else None,
        behaviour_log_prob=stacked("log_probs"),
        behaviour_by_modality=stacked("modality_log_probs") if "modality_log_probs" in found[0][0] else None,
        advantage=numbers([group.advantages[sample] for sample, _ in pairs], torch.float32),
        staleness=numbers([group.staleness[sample][k] for sample, k in pairs], torch.int64),
        weight=weight,
        sigma=send(schedule[indices], device),
        sigma_next=send(schedule[indices + 1], device),
        sigma_max=send(schedule[torch.ones_like(indices)], device),
        conditioning=conditioning[torch.tensor([numbers_of_calls[id(t)] for t, _ in found])].to(device),
        steps=steps,
        fresh=[row for row, (sample, k) in enumerate(pairs) if group.staleness[sample][k] == 0],
        row_ids=row_ids,
        needs=Needs([needs[i] for i in batch.rows], batch.calls),
    )
