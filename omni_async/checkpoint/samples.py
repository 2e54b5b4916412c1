"""Compares what the groups of a checkpoint were made with to the recipe.

Groups that wait for the trainer are of use to a run that would make the same ones; any other makes them again, from the
same prompts and seeds."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.algorithms.registry import find_objective
from omni_async.algorithms.trajectory_fields import trajectory_fields
from omni_async.checkpoint.state import State
from omni_async.config import Config
from omni_async.config.redact import redact
from omni_async.control.control_state import Unfinished

_ROLLOUT = (
    "group_size",
    "sampling",
    "buckets",
    "num_inference_steps",
    "share_initial_noise",
    "sde",
)


def made_with(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a sample and its score are, by their names; without secrets."""
    settings = {"run.seed": config.run.seed, **{f"rollout.{name}": getattr(config.rollout, name) for name in _ROLLOUT}}
    settings |= {"reward.scorers": config.reward.scorers, "reward.max_abs": config.reward.max_abs}
    settings["trajectory fields"] = trajectory_fields(find_objective(config.algorithm.name), config)
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(redact(msgspec.to_builtins(settings))))
    return plain


def _changed(before: dict[str, Any], config: Config) -> list[str]:
    """Return the names in `before`, a result of `made_with`, whose settings are others now.

    None is changed if the checkpoint has no such record."""
    now = made_with(config)
    return [name for name in before if before[name] != now.get(name)]


def fitting(state: State, config: Config) -> tuple[State, list[str]]:
    """Return `state` as this recipe can use it, and the settings that differ.

    Ready groups are turned into unfinished ones if the recipe would make others."""
    changed = _changed(state.samples, config)
    control = state.control
    if not (changed and control.ready):
        return state, []
    again = tuple(Unfinished(group.group) for group in control.ready)
    return replace(state, control=replace(control, ready=(), unfinished=(*control.unfinished, *again))), changed
