"""Decides which tensors engines must return with a sample: those that training reads, and no others, because each is
carried, stored and checkpointed for every sample. Imports no torch."""

from __future__ import annotations

from omni_async.algorithms.registry import Objective
from omni_async.config.schema import Config

_MEANS = "means"


def trajectory_fields(objective: Objective, config: Config) -> tuple[str, ...]:
    """Returns the names of `omni_async.rollout.base.Trajectory.tensors` that a training sample of this run must have:
    those of the objective, without the means of the behaviour policy where nothing reads them, and with them where the
    off-policy correction does."""
    fields = tuple(field for field in objective.fields if field != _MEANS)
    return (*fields, _MEANS) if reads_behaviour_means(objective, config) else fields


def reads_behaviour_means(objective: Objective, config: Config) -> bool:
    """Returns whether a gradient depends on the means under the policy that took the steps. They are as large as the
    latents, so a metric alone (`kappa_nats`) does not ask for them.

    An objective that takes old means gets those of the policy its ratio is taken to, which is the behaviour policy in
    mode `bypass` and is computed by the trainer in `decoupled` and `none`.
    """
    correction = config.correction
    return correction.kappa_nats is not None or (_MEANS in objective.fields and correction.mode == "bypass")
