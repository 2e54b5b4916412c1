"""From trajectories to micro-batches of rows, a row being one trained step of one sample.

Everything the loss reads is checked here, where it enters: a missing or misshapen field, a schedule that differs from the trainer's by one
bit, a NaN. Rows are sample-major: (sample 0, step 0), (sample 0, step 1), ..., (sample 1, step 0), ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.policy import Policy


@dataclass(frozen=True)
class GroupBatch:
    """This rank's samples of one prompt group.

    trajectories: `omni_async.rollout.base.Trajectory.tensors` on the CPU: latents (W + 1, T, C), log_probs (W,), optional means (W, T, C),
    sigmas (N + 1,), steps (W,) and conditioning. advantages: a number per trajectory.
    """

    trajectories: list[TensorDict]
    advantages: list[float]


@dataclass(frozen=True)
class Rows:
    """R rows on the trainer's device, float32: latents, next_latents and old_mean (R, T, C), all else (R,). `steps` stays on the host."""

    latents: Tensor
    next_latents: Tensor
    old_mean: Tensor | None
    old_log_prob: Tensor
    advantage: Tensor
    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    conditioning: TensorDict
    steps: list[int]


def check_group(group: GroupBatch, fields: Collection[str], sigmas: Tensor, latent_shape: tuple[int, ...]) -> int:
    """W, the number of trained steps of every sample. ValueError names the first sample that is not usable, and why.

    `sigmas` is the trainer's own schedule: a trajectory made with another one, even by one bit, would be trained with wrong ratios.
    """
    if not group.trajectories or len(group.trajectories) != len(group.advantages):
        raise ValueError(f"a group needs one advantage per trajectory, got {len(group.advantages)} for {len(group.trajectories)}")
    window = len(group.trajectories[0].get("steps", ()))
    for i, (trajectory, advantage) in enumerate(zip(group.trajectories, group.advantages, strict=True)):
        try:
            _check_fields(trajectory, {*fields, "sigmas", "steps"}, window, latent_shape)
            _check_schedule(trajectory, sigmas)
            if not torch.isfinite(torch.tensor(advantage)):
                raise ValueError(f"the advantage is {advantage}")
        except ValueError as error:
            raise ValueError(f"trajectory {i} of {len(group.trajectories)}: {error}") from error
    if len({"means" in t for t in group.trajectories}) > 1:
        raise ValueError("some trajectories of the group carry means and others do not")
    return window


def _check_fields(trajectory: TensorDict, fields: Collection[str], window: int, latent_shape: tuple[int, ...]) -> None:
    missing = sorted(set(fields) - set(trajectory.keys()))
    if missing:
        raise ValueError(f"the fields {missing} are missing; got {sorted(trajectory.keys())}")
    if window < 1:
        raise ValueError("it has no trained steps")
    shapes = {"steps": (window,), "latents": (window + 1, *latent_shape), "log_probs": (window,), "means": (window, *latent_shape)}
    for name in shapes.keys() & set(trajectory.keys()):
        tensor = trajectory[name]
        wanted = torch.int64 if name == "steps" else torch.float32
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != wanted:
            raise ValueError(f"{name} must be {wanted} of shape {shapes[name]}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def _check_schedule(trajectory: TensorDict, sigmas: Tensor) -> None:
    given, steps = trajectory["sigmas"], trajectory["steps"]
    if given.shape != sigmas.shape or given.dtype != sigmas.dtype:
        raise ValueError(f"sigmas must be {sigmas.dtype} of shape {tuple(sigmas.shape)}, got {given.dtype} of shape {tuple(given.shape)}")
    if not torch.equal(given, sigmas):
        i = int((given != sigmas).nonzero()[0])
        raise ValueError(
            f"sigmas differ from the trainer's schedule: sigmas[{i}] is {given[i].item()!r}, the trainer's is {sigmas[i].item()!r}; "
            "rollout and trainer must build them alike"
        )
    if steps.min() < 0 or steps.max() > len(sigmas) - 2:
        raise ValueError(f"steps must lie in [0, {len(sigmas) - 2}], got {steps.tolist()}")


def micro_batches(num_rows: int, size: int, num_batches: int) -> Iterator[tuple[range, bool]]:
    """`num_batches` pairs of (rows, whether they count): `num_rows` rows in cuts of `size`, then row 0 again as padding that counts for
    nothing, so that every rank joins the same collectives."""
    cuts = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    if len(cuts) > num_batches:
        raise ValueError(f"{num_rows} rows make {len(cuts)} micro-batches of {size}, more than the {num_batches} that every rank runs")
    yield from ((cut, True) for cut in cuts)
    yield from ((range(1), False) for _ in range(num_batches - len(cuts)))


def build_rows(group: GroupBatch, indices: range, window: int, policy: Policy, device: torch.device) -> Rows:
    """The rows `indices` of a checked group, on `device`."""
    pairs = [divmod(i, window) for i in indices]
    trajectories = [group.trajectories[sample] for sample, _ in pairs]
    steps = [int(t["steps"][k]) for t, (_, k) in zip(trajectories, pairs, strict=True)]

    def stacked(name: str, shift: int = 0) -> Tensor:
        return torch.stack([t[name][k + shift] for t, (_, k) in zip(trajectories, pairs, strict=True)]).to(device)

    def sigma(position: list[int]) -> Tensor:
        return torch.stack([t["sigmas"][i] for t, i in zip(trajectories, position, strict=True)]).to(device)

    return Rows(
        latents=stacked("latents"),
        next_latents=stacked("latents", 1),
        old_mean=stacked("means") if "means" in trajectories[0] else None,
        old_log_prob=stacked("log_probs"),
        advantage=torch.tensor([group.advantages[sample] for sample, _ in pairs], dtype=torch.float32, device=device),
        sigma=sigma(steps),
        sigma_next=sigma([i + 1 for i in steps]),
        sigma_max=sigma([1] * len(steps)),
        conditioning=policy.stack_conditioning([t["conditioning"] for t in trajectories]).to(device),
        steps=steps,
    )
