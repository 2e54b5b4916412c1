"""Describes the control plane between two messages, for the driver and `omni-async status`.

Contains pure functions, and `Record`: the part of a run's summary that its ledger does not have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from omni_async.config import Config
from omni_async.config.draws import drawn
from omni_async.control.control_state import ControlState
from omni_async.control.events import Shown
from omni_async.control.group_table import GroupTable
from omni_async.control.ledger import Ledger
from omni_async.control.reasons import count
from omni_async.control.rounds import Round
from omni_async.control.sample_table import SampleTable
from omni_async.control.validation import ValidationRound, mean_parts
from omni_async.types import ReadyGroup, UpdateReport


def update_event(
    report: UpdateReport, groups: Sequence[ReadyGroup], config: Config
) -> tuple[dict[str, Any], tuple[Shown, ...]]:
    """Return an update's event data, and the samples to show, if this update shows samples.

    `staleness` has one entry per group: the version trained from, minus the oldest version that took any of its trained
    steps. `buckets` has the mean reward of each bucket that was trained. `answers` has the numbers of tokens and of
    versions of each answer, if the model draws tokens.

    Args:
        report: the trainer's.
        groups: the groups that the update trained.
        config: the recipe; it defines how often and how many samples are shown."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    scores = [sample.score for _, sample in samples]
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
        versions = [sample.step_versions for _, sample in samples]
        data["answers"] = [(one.num_steps, len(one.spans)) for one in versions]
    if report.version % config.tracking.images_every and report.version not in (1, config.trainer.updates):
        return data, ()
    # A checkpoint keeps no media of its groups.
    shown = [Shown(one.media, prompt, one.score) for prompt, one in samples if one.media is not None]
    return data, _spread(shown, config.tracking.images)


def round_event(finished: ValidationRound, result: Round, num_shown: int) -> tuple[dict[str, Any], tuple[Shown, ...]]:
    """Return a round's event data, and some of its scored samples.

    Args:
        finished: the round, with its samples.
        result: its record.
        num_shown: how many samples are shown at most."""
    data = {
        "version": finished.version,
        "round": msgspec.to_builtins(result),
        "versions": list(finished.versions),
        "standard_error": finished.standard_error(),
    }
    shown = [
        Shown(one.result.media, one.request.prompt, one.score)
        for one in finished.samples
        if one.result is not None and one.score is not None
    ]
    return data, _spread(shown, num_shown)


def _spread(shown: list[Shown], count: int) -> tuple[Shown, ...]:
    """Return at most `count` of the samples, evenly apart."""
    return tuple(shown[:: max(1, len(shown) // count)][:count])


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
