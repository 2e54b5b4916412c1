"""Builds the coordinator's reports on updates and validation rounds.

They are numbers of finished groups, and the samples to show. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from omni_async.control.events import Shown
from omni_async.control.validation import ValidationRound
from omni_async.types import ReadyGroup, Score, UpdateReport

T = TypeVar("T")


def update_data(report: UpdateReport, groups: Sequence[ReadyGroup]) -> dict[str, Any]:
    """Return an update's event data.

    `staleness` has one entry per group: the version trained from, minus the oldest version that took any of its trained
    steps. `buckets` has the mean reward of each bucket that was trained."""
    scores = [sample.score for group in groups for sample in group.samples]
    return {
        "version": report.version,
        "started": report.started,
        "finished": report.finished,
        "metrics": report.metrics,
        "reward": sum(score.value for score in scores) / len(scores),
        "parts": _mean_parts(scores),
        "buckets": _mean_by_bucket(groups),
        "staleness": [report.version - 1 - group.oldest_version for group in groups],
    }


def _mean_by_bucket(groups: Sequence[ReadyGroup]) -> dict[int, float]:
    rewards: dict[int, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.bucket, []).extend(group.rewards)
    return {bucket: sum(values) / len(values) for bucket, values in sorted(rewards.items())}


def _mean_parts(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of every part, over the scores that have it."""
    names = sorted({name for score in scores for name in score.parts})
    values = {name: [score.parts[name] for score in scores if name in score.parts] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def update_shown(groups: Sequence[ReadyGroup], count: int) -> tuple[Shown, ...]:
    samples = [
        (group.prompt, sample) for group in groups for sample in group.samples if sample.media is not None
    ]  # a checkpoint keeps none
    return tuple(Shown(sample.media, prompt, sample.score) for prompt, sample in _spread(samples, count))


def round_data(finished: ValidationRound) -> dict[str, Any]:
    return {
        "version": finished.version,
        "versions": list(finished.versions),
        "parts": finished.means(),
        "failed": len(finished.failed),
    }


def round_shown(finished: ValidationRound, count: int) -> tuple[Shown, ...]:
    shown = [
        (s.result, s.request.prompt, s.score) for s in finished.samples if s.result is not None and s.score is not None
    ]
    return tuple(Shown(result.media, prompt, score) for result, prompt, score in _spread(shown, count))


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """Return at most `count` of the items, evenly apart."""
    return items[:: max(1, len(items) // count)][:count]
