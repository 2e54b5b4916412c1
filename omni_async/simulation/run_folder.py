"""Reads the parts of a finished run that a simulation needs: its configuration, measured profile and pace."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from omni_async.config import Config, ConfigError, load
from omni_async.performance.profile import Profile, read_profile
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.files import read_foreign
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import read_summary
from omni_async.types import Count, Time


class MeasuredRun(NamedTuple):
    """A run and its own measurements.

    `finished`: when the updates of its newest attempt ended, in seconds since the epoch; the profile covers these
    updates. `devices`: their number; None if the summary does not contain it."""

    config: Config
    profile: Profile
    finished: list[float]
    devices: float | None


_MOST_UPDATES = 100_000  # lines of metrics that are read


class _Update(msgspec.Struct):
    update: Count
    finished: Time


def read_measured(folder: Path) -> MeasuredRun:
    """Read the run in `folder`. Raises ConfigError, one line, if it is not a run or has no profile."""
    run = RunDirectory(folder)
    if not run.config_yaml.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml; give one, or a recipe")
    config = load(run.config_yaml, within=folder)
    if not run.profile.is_file():
        raise ConfigError(
            f"{folder} has no profile.json, which a run writes at its end if it made an update; end it with `omni-async"
            f" stop {folder}`, or simulate {run.config_yaml} with --profile"
        )
    (ended, _), (updates, _) = (
        read_foreign(run.attempts, Attempt, folder),
        read_foreign(run.metrics, _Update, folder, most=_MOST_UPDATES),
    )
    attempts = [one for one in ended if one.to_update > one.from_update]
    if attempts:  # the profile covers the last attempt that made updates
        updates = [line for line in updates if attempts[-1].from_update < line.update <= attempts[-1].to_update]
    try:
        devices = read_summary(run.summary).devices
    except (OSError, ValueError, RecursionError):
        devices = None
    profile = read_profile(run.profile, within=folder)
    return MeasuredRun(config, profile, [line.finished for line in updates], devices)
