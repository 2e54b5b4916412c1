"""Reads the parts of a finished run that a simulation needs: its configuration, measured profile and pace.

The pace is when its updates ended, and the seconds of each stage between them, to compare with the simulation.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from omni_async.config import Config, ConfigError, load
from omni_async.config.draws import drawn
from omni_async.performance.profile import Profile, read_profile
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.files import read_foreign
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import read_summary
from omni_async.records.write.timeline import clip, length, union
from omni_async.simulation.simulate import Steady
from omni_async.types import Count, Span, Time
from omni_async.worker import Worker


class MeasuredRun(NamedTuple):
    """A run and its own measurements.

    - `finished`: when the updates of its newest attempt ended, in seconds since the epoch; the profile covers these.
    - `devices`: their number; None if the summary does not contain it.
    - `stages`: as `stage_seconds`; empty without a timeline or a steady part.
    - `validation`: samples of a validation round.
    - `rejected`: share of the groups."""

    config: Config
    profile: Profile
    finished: list[float]
    devices: float | None
    stages: Mapping[str, float] = MappingProxyType({})
    validation: int = 0
    rejected: float = 0.0

    @property
    def comparison(self) -> dict[str, Any]:
        """Return the keyword arguments of `omni_async.simulation.what_if.what_if` that a recipe does not have."""
        return {name: getattr(self, name) for name in ("devices", "stages", "validation", "rejected")}


_MOST_UPDATES = 100_000  # lines of metrics that are read
# Bounds of what a simulation takes from a folder of others: samples of a round, and share of rejected groups.
_MOST_VALIDATED, _MOST_REJECTED = 100_000, 0.9
# Role -> kind of its spans -> their stage.
_STAGES = {
    "rollout": {"generate": "generation"},
    "reward": {"score": "scoring"},
    "trainer": {"train": "training", "proximal": "training", "export": "training", "checkpoint": "checkpoints"},
}


class _Update(msgspec.Struct):
    update: Count
    finished: Time


class _Round(msgspec.Struct):
    update: Count
    asked: Count


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
    (ended, _), (updates, _), (rounds, _) = (
        read_foreign(run.attempts, Attempt, folder),
        read_foreign(run.metrics, _Update, folder, most=_MOST_UPDATES),
        read_foreign(run.metrics, _Round, folder, most=_MOST_UPDATES),
    )
    attempts = [one for one in ended if one.to_update > one.from_update]
    if attempts:  # the profile covers the last attempt that made updates
        updates = [line for line in updates if attempts[-1].from_update < line.update <= attempts[-1].to_update]
    devices, rejected = None, 0.0
    try:
        summary = read_summary(run.summary)
        devices, ended_groups = summary.devices, summary.counters.trained + summary.counters.rejected
        rejected = min(_MOST_REJECTED, summary.counters.rejected / max(1, ended_groups))
    except (OSError, ValueError, RecursionError):
        pass
    finished = [line.finished for line in updates]
    stages: dict[str, float] = {}
    with suppress(OSError, ValueError, RecursionError):
        stages = stage_seconds(read_trace(run.trace), finished, config)
    profile = read_profile(run.profile, within=folder)
    if drawn(config) == "tokens" and profile.tokens is UNSET:
        raise ConfigError(
            f"{folder}: its profile has no times of tokens: no answer ended after the warm-up, or an older version"
            f" wrote it; simulate {run.config_yaml} with --profile NAME"
        )
    validation = min(_MOST_VALIDATED, max((line.asked for line in rounds), default=0))
    return MeasuredRun(config, profile, finished, devices, stages, validation, rejected)


def stage_seconds(spans: Iterable[Span], finished: Sequence[float], config: Config) -> dict[str, float]:
    """Return the seconds per update that a worker of each stage was busy in the steady part of a run.

    `generation` includes validation samples, and training the copying of weights. The rest of an update is the
    trainer's `waits`. Empty without spans or a steady part.

    Args:
        spans: of the run.
        finished: when its updates ended, in the clock's seconds, as in the spans.
        config: the run's."""
    try:
        steady = Steady(config, len(finished))
    except ValueError:
        return {}
    start, end, updates = finished[steady.first - 1], finished[steady.last - 1], steady.last - steady.first
    workers = {"generation": config.rollout.workers, "scoring": config.reward.workers}
    times: dict[str, dict[str, array[float]]] = defaultdict(lambda: defaultdict(lambda: array("d")))
    for span in spans:
        worker = Worker.parse(span.actor)
        stage = _STAGES.get(worker.role, {}).get(span.kind)
        if stage is not None:
            times[stage][worker.slot].extend((span.start, span.end))
    if not times or end <= start:
        return {}
    found = {}
    for stage in ("generation", "scoring", "training", "checkpoints"):
        own = (union(zip(one[::2], one[1::2], strict=True)) for one in times[stage].values())
        busy = sum(length(clip(one, start, end)) for one in own)
        found[stage] = busy / workers.get(stage, 1) / updates
    waits = (end - start) / updates - found["training"] - found["checkpoints"]
    return found | {"waits": max(0.0, waits)}
