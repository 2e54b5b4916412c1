"""Keeps the best checkpoints by validation reward: decides when to write one, whose reward it has, and which must stay.

A validation round is due at each multiple of `validation.every`, and a checkpoint is written at each of them. The round
begins once every engine holds that version. Engines that have taken over a newer version meanwhile are validated at
that version, at most `staleness.max_updates` updates later. Its reward then counts for the checkpoint that made the
round due. `control/rounds.py` defines how rounds are compared and which cannot be the best.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from omni_async.config import Config
from omni_async.control.control_state import ControlState
from omni_async.control.rounds import Round, ranked


def is_due(config: Config, version: int) -> bool:
    """Return whether a checkpoint is due at `version`; the last version is always written as well."""
    own = config.checkpoint.keep_best > 0 and _is_validated(config, version)
    return version % config.checkpoint.every == 0 or own


def worth_keeping(config: Config, versions: Collection[int], control: ControlState) -> set[int]:
    """Return the checkpoints that must stay: the best so far, and those whose validation round has not finished.

    Args:
        config: the run's.
        versions: the checkpoints'.
        control: the run so far."""
    if config.validation is None or config.checkpoint.keep_best == 0:
        return set()
    measured = rounds_of(config, versions, control.rounds)
    over = -1 if control.validated is None else control.validated
    # If engines passed over a version, its round begins at a later one.
    open_ = {v for v in versions if _is_validated(config, v) and v + config.staleness.max_updates > over}
    return {*best_first(measured, control.rounds)[: config.checkpoint.keep_best], *(open_ - measured.keys())}


def rounds_of(config: Config, versions: Collection[int], rounds: Iterable[Round]) -> dict[int, Round]:
    """Return the validation round of each checkpoint whose round has a reward.

    Args:
        config: the run's.
        versions: the checkpoints'.
        rounds: the finished ones."""
    every = 1 if config.validation is None else config.validation.every
    own: dict[int, Round] = {}
    passed_over: dict[int, Round] = {}
    for one in rounds:
        if one.reward is None or not math.isfinite(one.reward):
            continue
        due = one.version - one.version % every
        if one.version in versions:
            own[one.version] = one
        elif due in versions and one.version - due <= config.staleness.max_updates:
            passed_over[due] = one
    return passed_over | own


def best_first(measured: Mapping[int, Round], rounds: Iterable[Round]) -> list[int]:
    """Return the versions of the checkpoints whose rounds may be the best, best first.

    Args:
        measured: checkpoint -> its round.
        rounds: all rounds of the run, so that the order does not depend on which checkpoints are left."""
    checkpoint_of = {one.version: version for version, one in measured.items()}
    return [checkpoint_of[one.version] for one in ranked(rounds) if one.version in checkpoint_of]


def _is_validated(config: Config, version: int) -> bool:
    """Return whether a validation round of a real policy is due at `version`."""
    if config.validation is None or config.emulation is not None:
        return False
    return version % config.validation.every == 0 or version == config.trainer.updates
