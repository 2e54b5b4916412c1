"""Objectives by name, each with the trajectory fields that rollout engines must return for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from omni_async.algorithms.objectives.base import ObjectiveOutput, ObjectiveSettings, StepInputs

Compute: TypeAlias = "Callable[[StepInputs, ObjectiveSettings], ObjectiveOutput]"


@dataclass(frozen=True)
class Objective:
    """`fields` are names of `omni_async.rollout.base.Trajectory.tensors`. `homogeneous(settings)` says whether the loss scales with the
    advantage, loss(c A) = c loss(A) for c > 0: that is what lets the trainer stream groups under a global std."""

    name: str
    fields: tuple[str, ...]
    compute: Compute
    homogeneous: Callable[[ObjectiveSettings], bool]

    def check_fields(self, available: Collection[str]) -> None:
        missing = [field for field in self.fields if field not in available]
        if missing:
            raise ValueError(f"objective {self.name!r} needs the trajectory fields {missing}, which are missing; got {sorted(available)}")


_OBJECTIVES: dict[str, Objective] = {}


def register_objective(
    name: str, *, fields: tuple[str, ...], homogeneous: Callable[[ObjectiveSettings], bool]
) -> Callable[[Compute], Compute]:
    """Decorator: registers the function as the objective `name`. ValueError if the name is taken."""

    def register(compute: Compute) -> Compute:
        if name in _OBJECTIVES:
            raise ValueError(f"objective {name!r} is already registered")
        _OBJECTIVES[name] = Objective(name, fields, compute, homogeneous)
        return compute

    return register


def find_objective(name: str) -> Objective:
    """The objective registered as `name`; ValueError lists the known ones."""
    import_module("omni_async.algorithms.objectives")
    if name not in _OBJECTIVES:
        raise ValueError(f"algorithm.name: expected one of {sorted(_OBJECTIVES)}, got {name!r}")
    return _OBJECTIVES[name]
