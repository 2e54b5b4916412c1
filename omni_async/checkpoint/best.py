"""Keeps the best checkpoints by validation reward: when one is written, whose reward it is, which may not go.

A round is made due by a multiple of `validation.every`, and a checkpoint is written at each of them. It begins once
every engine holds that version; engines that took a newer one over meanwhile are validated at that one, at most
`staleness.max_updates` updates later. Its reward then stands for the checkpoint that made it due.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from omni_async.config import Config
from omni_async.control.control_state import ControlState


def is_due(config: Config, version: int) -> bool:
    """Return whether a checkpoint is to be written at `version`, which may be the last in any case."""
    own = config.checkpoint.keep_best > 0 and _is_validated(config, version)
    return version % config.checkpoint.every == 0 or own


def worth_keeping(config: Config, versions: Collection[int], control: ControlState) -> set[int]:
    """Return which of the checkpoints may not go: the best so far, and those whose validation round is not over.

    Args:
        config: the run's.
        versions: the checkpoints'.
        control: the run so far."""
    if config.validation is None or config.checkpoint.keep_best == 0:
        return set()
    rewards = rewards_of(config, versions, ((one.version, one.reward) for one in control.rounds))
    over = -1 if control.validated is None else control.validated
    # The round of a version that engines passed over begins at a later one.
    open_ = {v for v in versions if _is_validated(config, v) and v + config.staleness.max_updates > over}
    return {*best_first(rewards)[: config.checkpoint.keep_best], *(open_ - rewards.keys())}


def rewards_of(
    config: Config, versions: Collection[int], rounds: Iterable[tuple[int, float | None]]
) -> dict[int, float]:
    """Return the validation reward of each of the checkpoints that have one.

    Args:
        config: the run's.
        versions: the checkpoints'.
        rounds: the finished ones: the version each began with, and its mean reward; None and NaN are no reward."""
    every = 1 if config.validation is None else config.validation.every
    own: dict[int, float] = {}
    passed_over: dict[int, float] = {}
    for began, reward in rounds:
        if reward is None or not math.isfinite(reward):
            continue
        due = began - began % every
        if began in versions:
            own[began] = reward
        elif due in versions and began - due <= config.staleness.max_updates:
            passed_over[due] = reward
    return passed_over | own


def best_first(rewards: Mapping[int, float]) -> list[int]:
    """Return the versions, that of the highest reward first; of equal ones the newer, which was trained for longer."""
    return sorted(rewards, key=lambda version: (rewards[version], version), reverse=True)


def _is_validated(config: Config, version: int) -> bool:
    """Return whether a validation round is due at `version`, whose reward is a policy's."""
    if config.validation is None or config.emulation is not None:
        return False
    return version % config.validation.every == 0 or version == config.trainer.updates
