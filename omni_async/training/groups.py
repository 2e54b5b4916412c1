"""Checks prompt groups, and cuts a rank's rows of a group into micro-batches that all ranks can run together.

A group is refused if it has a missing or misshapen field, a NaN, or a schedule that differs by one bit from the
trainer's.

Under FSDP2 every call of a component is a collective. So all ranks must run equally many micro-batches and call the
same components in each. Rows that need different components are separated, one component after the other, if possible.
Rows of a sample that must stay together share a micro-batch, which calls every component that any rank needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.config.rollout import Rollout
from omni_async.diffusion.policy import Policy
from omni_async.plugins.families import SamplingSpec
from omni_async.types import Prompt

# Dtypes other than float32. A log-ratio needs digits that a mean log-prob in float32 lacks (`sde.transitions`).
_DTYPES = {"steps": torch.int64, "log_probs": torch.float64, "modality_log_probs": torch.float64}


@dataclass(frozen=True)
class GroupBatch:
    """This rank's samples of one prompt group; see `omni_async.types.TrainGroup` for everything except the tensors.

    trajectories: `omni_async.rollout.base.Trajectory.tensors` on the CPU. For transition objectives latents (W + 1,
        *shape), log_probs (W,) float64, optional means (W, *shape), sigmas (N + 1,), steps (W,) and conditioning; for
        forward-process objectives final (*shape), sigmas and conditioning; for token objectives prompt (P,) and tokens
        (T,) int32, and log_probs (T,) float32. A sample of several calls
        (`omni_async.rollout.calls`) has a TensorDict of these per call, and trains the steps of all calls in turn.
    size: the number of samples in the whole group, on all ranks together.
    proximal_ratio: use the ratio to the proximal policy, regardless of algorithm.correction.
    counts: False if this rank has no samples of the group. It then has a sample of another rank, which is computed,
        because that is collective, and adds nothing.
    members: (group, sample number) of each trajectory if several groups are joined; None: all are of `group`.
    prompts: the prompt of each trajectory, for kinds whose rows are tokens."""

    group: int
    spec: SamplingSpec
    trajectories: Sequence[TensorDict]
    advantages: Sequence[float]
    seeds: Sequence[int]
    staleness: Sequence[Sequence[int]]
    size: int
    weights: Sequence[Sequence[float]] | None = None
    proximal_ratio: bool = False
    counts: bool = True
    members: Sequence[tuple[int, int]] | None = None
    prompts: Sequence[Prompt] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.trajectories), len(self.advantages), len(self.seeds), len(self.staleness)}
        lengths |= {len(given) for given in (self.weights, self.prompts) if given is not None}
        if lengths != {len(self.trajectories)} or not self.trajectories:
            raise ValueError(
                "a group needs one advantage, seed, staleness, weight and prompt per trajectory, got"
                f" {sorted(lengths)} of them"
            )

    @property
    def sample_ids(self) -> Sequence[tuple[int, int]]:
        """Return (group, sample number) of each trajectory, the same before and after groups are joined."""
        return self.members or [(self.group, sample) for sample in range(len(self.trajectories))]


def joined(groups: Sequence[GroupBatch]) -> GroupBatch:
    """Join groups into one batch, so that their rows share micro-batches.

    Args:
        groups: at least one, all with the same spec, in the order of the deal over the ranks. Padding is dropped if
            this rank has samples of any group."""
    own = [group for group in groups if group.counts] or groups[:1]
    weights = [row for group in own for row in group.weights or ()]
    return replace(
        own[0],
        trajectories=[trajectory for group in own for trajectory in group.trajectories],
        advantages=[advantage for group in own for advantage in group.advantages],
        seeds=[seed for group in own for seed in group.seeds],
        staleness=[staleness for group in own for staleness in group.staleness],
        size=sum(group.size for group in groups),
        weights=None if own[0].weights is None else weights,
        members=[member for group in own for member in group.sample_ids],
        prompts=None if own[0].prompts is None else [one for group in own for one in group.prompts or ()],
    )


class Drawn:
    """The required latent shape and schedule of trajectories, for each of the recipe's specs.

    The constructor raises the errors of `policy` about a spec."""

    def __init__(self, policy: Policy, rollout: Rollout) -> None:
        steps = rollout.num_inference_steps
        self._of = {
            spec: (tuple(policy.latent_shape(spec)), policy.sigmas(steps, spec).cpu()) for spec in rollout.specs
        }

    def by(self, spec: SamplingSpec) -> tuple[tuple[int, ...], Tensor]:
        """Return the latents' shape, and the sigmas (N + 1,) on the CPU."""
        if spec not in self._of:
            raise ValueError(f"the group was drawn by {spec}, which is not one of the recipe's")
        return self._of[spec]


def calls_of(trajectory: TensorDict) -> list[TensorDict]:
    """Return the trajectories of a sample's calls, in order: the sample itself, unless a program joined several."""
    names = [*trajectory.keys()]
    return [trajectory[f"call{number}"] for number in range(len(names))] if "call0" in names else [trajectory]


def find_step(trajectory: TensorDict, position: int) -> tuple[TensorDict, int]:
    """Return the call with a sample's trained step, and the step's position in the call's window.

    Args:
        trajectory: the sample's.
        position: the position among all trained steps, call after call."""
    calls = calls_of(trajectory)
    call, within = divmod(position, len(calls[0]["steps"]))
    return calls[call], within


def check_group(group: GroupBatch, fields: Collection[str], sigmas: Tensor, latent_shape: tuple[int, ...]) -> int:
    """Return W, the number of trained steps of every call of every sample (0 for forward-process objectives).

    Args:
        group: this rank's samples, as they arrived.
        fields: the tensors that training reads of every sample (`trajectory_fields`).
        sigmas: the trainer's own schedule (N + 1,). A trajectory whose schedule differs, even by one bit, would be
            trained with wrong ratios.
        latent_shape: the shape of a sample's latents.

    Raises:
        ValueError: names the first unusable sample, and the reason."""
    first = calls_of(group.trajectories[0])
    window = len(first[0].get("steps", ()))
    for i, (trajectory, advantage) in enumerate(zip(group.trajectories, group.advantages, strict=True)):
        calls = calls_of(trajectory)
        try:
            if len(calls) != len(first):
                raise ValueError(f"it has {len(calls)} calls, the first has {len(first)}")
            for call in calls:
                _check_fields(call, {*fields, "sigmas", "steps"}, window, latent_shape)
                _check_schedule(call, sigmas)
            if not math.isfinite(advantage):
                raise ValueError(f"the advantage is {advantage}")
        except ValueError as error:
            raise ValueError(f"trajectory {i} of {len(group.trajectories)}: {error}") from error
    if len({"means" in call for t in group.trajectories for call in calls_of(t)}) > 1:
        raise ValueError("some trajectories of the group carry means and others do not")
    return window


def _check_fields(trajectory: TensorDict, fields: Collection[str], window: int, latent_shape: tuple[int, ...]) -> None:
    missing = sorted(set(fields) - set(trajectory.keys()))
    if missing:
        raise ValueError(f"the fields {missing} are missing; got {sorted(trajectory.keys())}")
    if "latents" in fields and window < 1:
        raise ValueError("it has no trained steps")
    shapes = {
        "steps": (window,),
        "latents": (window + 1, *latent_shape),
        "log_probs": (window,),
        "modality_log_probs": (window, *trajectory.get("modality_log_probs", torch.empty(0, 0)).shape[1:]),
        "means": (window, *latent_shape),
        "final": latent_shape,
    }
    for name in shapes.keys() & set(trajectory.keys()):
        tensor = trajectory[name]
        wanted = _DTYPES.get(name, torch.float32)
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != wanted:
            raise ValueError(
                f"{name} must be {wanted} of shape {shapes[name]}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def _check_schedule(trajectory: TensorDict, sigmas: Tensor) -> None:
    given, steps = trajectory["sigmas"], trajectory["steps"]
    if given.shape != sigmas.shape or given.dtype != sigmas.dtype:
        raise ValueError(
            f"sigmas must be {sigmas.dtype} of shape {tuple(sigmas.shape)}, got {given.dtype} of shape"
            f" {tuple(given.shape)}"
        )
    if not torch.equal(given, sigmas):
        i = int((given != sigmas).nonzero()[0])
        raise ValueError(
            f"sigmas differ from the trainer's schedule: sigmas[{i}] is {given[i].item()!r}, the trainer's is"
            f" {sigmas[i].item()!r}; rollout and trainer must build them alike"
        )
    if len(steps) and (steps.min() < 0 or steps.max() > len(sigmas) - 2):
        raise ValueError(f"steps must be in [0, {len(sigmas) - 2}], got {steps.tolist()}")


Largest = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a group, by number.

    `calls`: the components that every rank calls. `counts`: False for padding, which is computed and adds nothing to
    the gradient."""

    rows: Sequence[int]
    calls: tuple[str, ...]
    counts: bool


@dataclass(frozen=True)
class Needs:
    """The component of each row of a batch, and the components that every rank calls, in the policy's order."""

    of_rows: Sequence[str]
    calls: tuple[str, ...]


def micro_batches(
    needs: Sequence[str], size: int, unit: int, most: int, components: Sequence[str], largest: Largest
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches, then padding, so that every rank has equally many.

    Args:
        needs: the component that each of this rank's rows needs.
        size: the approximate number of rows in a micro-batch, which has whole units, at least one.
        unit: the number of consecutive rows that stay together.
        most: the largest number of rows on any rank.
        components: all components of the policy, in its order.
        largest: returns the largest value over all ranks for each number of a list; called once if there are several
            components, otherwise never."""
    size = max(1, size // unit) * unit
    if len(components) == 1:
        yield from _cut(range(len(needs)), size, unit, _num_cuts(most, size), tuple(components))
        return
    if unit > 1:
        used = largest([int(name in needs) for name in components] + [_num_cuts(len(needs), size)])
        calls = tuple(name for name, yes in zip(components, used, strict=False) if yes)
        yield from _cut(range(len(needs)), size, unit, used[-1], calls)
        return
    rows = {name: [row for row, needed in enumerate(needs) if needed == name] for name in components}
    cuts = largest([_num_cuts(len(rows[name]), size) for name in components])
    for name, number in zip(components, cuts, strict=True):
        yield from _cut(rows[name], size, unit, number, (name,))


def _num_cuts(num_rows: int, size: int) -> int:
    return -(-num_rows // size)


def _cut(rows: Sequence[int], size: int, unit: int, number: int, calls: tuple[str, ...]) -> Iterator[MicroBatch]:
    """Yield `rows` in cuts of `size`, then the first unit again until there are `number` micro-batches."""
    cuts = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(cuts) > number:
        raise ValueError(
            f"{len(rows)} rows make {len(cuts)} micro-batches of {size}, more than the {number} that every rank runs"
        )
    yield from (MicroBatch(cut, calls, True) for cut in cuts)
    padding = rows[:unit] or range(unit)  # a rank without a row for the component takes any rows
    yield from (MicroBatch(padding, calls, False) for _ in range(number - len(cuts)))
