"""Finds objectives by name: what each needs of a run, known without importing torch, and the function that computes it.

Built-in objectives are listed in `catalogue`; other packages add theirs through the entry-point group
`omni_async.objectives` (each entry point is an `Objective`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from omni_async.config.algorithm import Algorithm
from omni_async.config.objective_section import OBJECTIVES
from omni_async.config.schema import Config
from omni_async.config.section import Section
from omni_async.entry_points import load_named

AuxiliaryPolicy = Literal["reference", "old", "ema"]


def _nothing(config: Config) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Objective:
    """An objective, its requirements and the function that computes it.

    kind: the `omni_async.algorithms.kinds.Kind` of its rows. "transition" objectives train denoising steps of a window,
        from recorded latents and log-probs; "forward" objectives noise final latents themselves and need nothing else
        of a sample; "preference" ones do so with a group's best and worst sample.
    compute: `module:function`; (inputs of its kind, Algorithm) -> ObjectiveOutput. TransitionInputs for "transition",
        ForwardInputs for "forward" and "preference".
    fields: the trajectory tensors it reads, names of `omni_async.rollout.base.Trajectory.tensors`; its kind decides
        which of them engines return.
    unit: the rows that a micro-batch must not separate: a "row", or all rows of a "sample". Pairs stay together anyway.
    homogeneous: whether loss(c A) = c loss(A) for c > 0 under these settings, which lets the trainer stream groups
        under a global std.
    auxiliary: the auxiliary policies whose velocities the function needs (`reference_velocity` or `ref_mean`, ...).
    old_decay: decay of the old policy, which draws the samples where there is one: after update u (from 1) it becomes
        decay(u) * itself + (1 - decay(u)) * the current policy.
    settings: the section that `algorithm.settings` is, of an objective of another package; built-in ones have sections
        of the schema. Every field has a `doc`.
    problems: combinations with the rest of the configuration that cannot work, one message each.
    """

    name: str
    summary: str
    kind: str
    compute: str
    fields: tuple[str, ...]
    unit: Literal["row", "sample"] = "row"
    homogeneous: Callable[[Algorithm], bool] = lambda algorithm: False
    auxiliary: Callable[[Algorithm], frozenset[AuxiliaryPolicy]] = lambda algorithm: frozenset()
    old_decay: Callable[[Algorithm, int], float] = lambda algorithm, update: 0.0
    settings: type[Section] | None = None
    problems: Callable[[Config], Iterator[str]] = _nothing

    def __post_init__(self) -> None:
        if self.settings is not None and not issubclass(self.settings, Section):
            raise TypeError(
                f"objective {self.name!r}: settings must be a subclass of omni_async.config.section.Section, which"
                f" refuses unknown keys, got {self.settings!r}"
            )

    def load(self) -> Callable[[Any, Algorithm], Any]:
        """Load the function itself (imports torch)."""
        function: Callable[[Any, Algorithm], Any] = load_named(self.compute)
        return function


def objectives() -> dict[str, Objective]:
    """Return every objective by name, those of other packages included; a built-in name cannot be taken."""
    from omni_async.algorithms.catalogue import BUILT_IN

    installed: dict[str, Objective] = {point.name: point.load() for point in entry_points(group=OBJECTIVES)}
    return {**installed, **{objective.name: objective for objective in BUILT_IN}}


def find_objective(name: str) -> Objective:
    """Return the objective called `name`; ValueError lists the known ones."""
    from omni_async.algorithms.catalogue import BUILT_IN

    # Other packages cannot take a built-in name, so they are only read, which is slow, for other names.
    known = {objective.name: objective for objective in BUILT_IN}
    if name not in known:
        known = objectives()
    if name not in known:
        raise ValueError(f"algorithm.name: expected one of {sorted(known)}, got {name!r}")
    return known[name]
