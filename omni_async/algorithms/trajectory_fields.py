"""Decides which tensors engines must return with a sample.

Those that training reads, and no others, because each is carried, stored and checkpointed for every sample. Imports no
torch."""

from __future__ import annotations

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import Objective
from omni_async.config.schema import Config


def trajectory_fields(objective: Objective, config: Config) -> tuple[str, ...]:
    """Return the names of the `Trajectory.tensors` that a training sample of this run must have."""
    return find_kind(objective.kind).fields(objective, config)
