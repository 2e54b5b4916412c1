"""Describes the control plane between two messages, for the driver and `omni-async status`.

Contains pure functions, and `Record`: the part of a run's summary that its ledger does not have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from omni_async.config import Config
from omni_async.config.draws import drawn
from omni_async.config.held import spread
from omni_async.control.control_state import ControlState
from omni_async.control.events import Shown
from omni_async.control.group_table import GroupTable
from omni_async.control.ledger import Ledger
from omni_async.control.reasons import count
from omni_async.control.rounds import Round
from omni_async.control.sample import SampleSet
from omni_async.control.sample_table import SampleTable
from omni_async.control.validation import ValidationRound, mean_parts
from omni_async.types import ReadyGroup, UpdateReport


def update_event(report: UpdateReport, groups: Sequence[ReadyGroup], config: Config) -> dict[str, Any]:
    """Return an update's event data.

    `staleness` has one entry per group: the version trained from, minus the oldest version that took any of its trained
    steps. `buckets` has the mean reward of each bucket that was trained. `answers` has the numbers of tokens and of
    versions of each answer, if the model draws tokens.

    Args:
        report: the trainer's.
        groups: the groups that the update trained.
        config: the recipe."""
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.score for sample in samples]
    rewards: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.bucket] += group.rewards
    data = {
        "version": report.version,
        "started": report.started,
        "finished": report.finished,
        "metrics": report.metrics,
        "reward": sum(score.value for score in scores) / len(scores),
        "parts": dict(sorted(mean_parts(scores).items())),
        "buckets": {bucket: sum(values) / len(values) for bucket, values in sorted(rewards.items())},
        "staleness": [report.version - 1 - group.oldest_version for group in groups],
    }
    if drawn(config) == "tokens":
        versions = [sample.step_versions for sample in samples]
        data["answers"] = [(one.num_steps, len(one.spans)) for one in versions]
    return data


def round_event(finished: ValidationRound, result: Round) -> dict[str, Any]:
    """Return a round's event data.

    Args:
        finished: the round, with its samples.
        result: its record."""
    return {
        "version": finished.version,
        "round": msgspec.to_builtins(result),
        "versions": list(finished.versions),
        "standard_error": finished.standard_error(),
    }


def shown_of(sets: Iterable[SampleSet], count: int) -> tuple[Shown, ...]:
    """Return at most `count` of the scored samples that still have their media, evenly apart.

    Samples of a group from a checkpoint have none."""
    found = [
        Shown(one.result.media, one.request.prompt, one.score)
        for each in sets
        for one in each.samples
        if one.score is not None and one.result is not None and one.result.media is not None
    ]
    return tuple(found[position] for position in spread(len(found), count))


def buffer_statistics(groups: GroupTable, samples: SampleTable) -> dict[str, dict[str, Any]]:
    """Return the contents of the bounded buffers, by name: slots, replay, trajectories, bytes.

    `reserved` counts promised and filled room. `ready` counts contents that can be taken now, or bytes that are held.
    `most` is the highest `ready` since the last update. `capacity` of bytes is None without a bound."""
    return {**groups.statistics(), "trajectories": samples.statistics(), "bytes": samples.bytes.statistics()}


def totals(groups: GroupTable, samples: SampleTable) -> dict[str, Any]:
    """Return the contents of the buffers, and the numbers of training samples and denoising steps.

    `images` counts the samples generated so far; the other numbers are those since the last update."""
    counted = ("images", "drawn", "encoded", "cached", "steps", "shared_steps")
    return {"buffers": buffer_statistics(groups, samples), **{name: getattr(samples, name) for name in counted}}


def endings(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Return the groups by ending, and the short reasons of rejected and of dropped groups."""
    return {
        "conservation": ledger.counters(),
        "reasons": count(ledger.reasons),
        "drop_reasons": count(ledger.drop_reasons),
    }


class Record:
    """The mean reward of every update, and the validation rounds.

    It is part of a checkpoint, so that a resumed run's summary depends on no file that may be removed or changed."""

    def __init__(self, start: ControlState) -> None:
        self.rewards = [*start.rewards]
        self._rounds = [*start.rounds]

    def updated(self, reward: float) -> None:
        """Add the mean reward of an update."""
        self.rewards.append(_finite(reward))

    def validated(self, finished: Round) -> None:
        """Add a round, even if no sample was scored."""
        self._rounds.append(finished)

    def rounds(self, until: int | None) -> tuple[Round, ...]:
        """Return the rounds of versions up to `until`; a resumed run repeats later rounds."""
        return () if until is None else tuple(round_ for round_ in self._rounds if round_.version <= until)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
