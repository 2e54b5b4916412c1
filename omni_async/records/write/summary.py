"""Summarises a run in `summary.json`, from its counters and records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from omni_async.config.decoding import decode_json
from omni_async.config.reading import read_file
from omni_async.config.redact import redact_text
from omni_async.config.writing import write_atomic
from omni_async.control.rounds import Change, NotComparable, Round, compare, first_and_last
from omni_async.records.write.activity import Activity, busy_fractions
from omni_async.types import Amount, Count, Seconds, Value

Status = Literal["done", "interrupted", "failed"]
_ENDS = 5
_LARGEST_FILE = 2**24  # bytes


class Counters(msgspec.Struct, frozen=True):
    """Counts of groups by how they ended; `live` groups have not. `admitted` is always the sum of the others."""

    admitted: Count
    trained: Count
    rejected: Count
    dropped: Count
    live: Count

    @property
    def conserved(self) -> bool:
        return self.admitted == self.trained + self.rejected + self.dropped + self.live


class ValidationPoint(msgspec.Struct, frozen=True):
    """The means of a validation round over its scored samples, `samples` of `asked`.

    `value` and a part are null if no sample has one. `reasons`: reason for a missing score -> number of samples.
    `samples` and `asked` are null if they were not recorded."""

    version: Count
    value: Value | None
    parts: dict[str, Value | None] = {}
    samples: Count | None = None
    asked: Count | None = None
    reasons: dict[str, Count] = {}

    @classmethod
    def of(cls, finished: Round) -> ValidationPoint:
        """Return the numbers of a round, without individual samples."""
        counts = finished.scored, finished.asked, finished.reasons
        return cls(finished.version, finished.reward, finished.parts, *counts)


class Summary(msgspec.Struct, frozen=True):
    """The summary of a run.

    `wall_s`: seconds after loading, over all attempts up to this one. `images_per_s`: generated training images over
    that time, of the whole job; `images_per_s_per_device` divides it by *all* devices (trainer's and reward workers'
    included). `first_reward` and `last_reward`: means of the first and last 5 updates. `staleness`: staleness -> number
    of trained groups. `reject_reasons` and `drop_reasons`: reason -> groups; summaries of earlier versions have no
    `drop_reasons` and count dropped groups in `reject_reasons`. `validation_change`: the first and the last round over
    the samples scored in both; null if there are fewer than two rounds, or they are not comparable.

    Only the newest attempt counts for `busy` (role -> {busy, backpressured, starved}), `overlap_fraction`,
    `peak_memory_bytes`, `cpu_s` (role -> CPU seconds on the driver's machine, its start included) and `faults` (parts
    that were lost and replaced). `unwritten`: file of the run folder -> why it could not be written at the end."""

    run: str
    status: Status
    reason: str | None
    updates: Count
    wall_s: Seconds
    images: Count
    images_per_s: Amount
    images_per_s_per_device: Amount
    devices: Amount
    busy: dict[str, dict[str, Value]]
    overlap_fraction: Value
    staleness: dict[Count, Count]
    staleness_max: Count | None
    counters: Counters
    conserved: bool
    reject_reasons: dict[str, Count]
    first_reward: Value | None
    last_reward: Value | None
    validation: tuple[ValidationPoint, ...]
    peak_memory_bytes: Count | None
    faults: Count = 0
    unwritten: dict[str, str] = {}
    drop_reasons: dict[str, Count] | None = None
    validation_change: Change | None = None
    cpu_s: dict[str, Seconds] = {}


def summarise(
    *,
    run: str,
    status: Status,
    started: float,
    finished: float,
    images: int,
    rewards: Sequence[float],
    staleness: Iterable[int],
    counters: Counters,
    activity: Activity,
    devices: float,
    reason: str | None = None,
    reject_reasons: dict[str, int] | None = None,
    drop_reasons: dict[str, int] | None = None,
    rounds: Iterable[Round] = (),
    peak_memory_bytes: int | None = None,
    cpu_s: Mapping[str, float] | None = None,
    wall_before: float = 0.0,
    untimed_images: int = 0,
    faults: int = 0,
) -> Summary:
    """Summarise a run.

    Args:
        run: the run's id.
        status: how it ended.
        started: time of the first request for a sample, by the clock of the spans.
        finished: time of the run's end, by the same clock.
        images: number of generated training samples, earlier attempts included.
        rewards: the mean reward of each update.
        staleness: one number of updates per trained group.
        counters: the groups by how they ended.
        activity: that of this attempt, since `started`.
        devices: number of accelerators of the job, or of CPUs if it has none.
        reason: why it ended, unless it is done; credentials are masked.
        reject_reasons: reason -> number of rejected groups.
        drop_reasons: reason -> number of dropped groups.
        rounds: the finished validation rounds, in any order.
        peak_memory_bytes: the maximum held by all processes together.
        cpu_s: role -> CPU seconds.
        wall_before: seconds of earlier attempts.
        untimed_images: the part of `images` from earlier attempts whose time was not recorded.
        faults: parts that were lost and replaced."""
    wall = wall_before + max(0.0, finished - started)
    rate = (images - untimed_images) / wall if wall > 0 else 0.0
    counts = dict(sorted(Counter(staleness).items()))
    ordered = sorted(rounds, key=lambda one: one.version)
    return Summary(
        run=run,
        status=status,
        reason=reason and redact_text(reason),
        updates=len(rewards),
        wall_s=wall,
        images=images,
        images_per_s=rate,
        images_per_s_per_device=rate / devices if devices > 0 else rate,
        devices=devices,
        busy=busy_fractions(activity, finished),
        overlap_fraction=activity.overlap(finished),
        staleness=counts,
        staleness_max=max(counts, default=None),
        counters=counters,
        conserved=counters.conserved,
        reject_reasons=dict(sorted((reject_reasons or {}).items())),
        first_reward=_mean(rewards[:_ENDS]),
        last_reward=_mean(rewards[-_ENDS:]),
        drop_reasons=dict(sorted((drop_reasons or {}).items())),
        validation=tuple(ValidationPoint.of(one) for one in ordered),
        validation_change=_change(ordered),
        peak_memory_bytes=peak_memory_bytes,
        cpu_s={role: round(seconds, 2) for role, seconds in (cpu_s or {}).items()},
        faults=faults,
    )


def write_summary(path: Path, summary: Summary) -> None:
    write_atomic(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_summary(path: Path) -> Summary:
    """Read the summary in a run folder. Raises OSError, or ValueError if it is invalid or has impossible numbers."""
    summary: Summary = decode_json(read_file(path, _LARGEST_FILE, within=path.parent), Summary)
    return summary


class _Ending(msgspec.Struct):
    status: Status
    updates: Count = 0


def read_ending(path: Path) -> tuple[Status | None, int]:
    """Read a run's final status and number of updates; (None, 0) if there is no readable summary."""
    try:
        ending: _Ending = decode_json(read_file(path, _LARGEST_FILE, within=path.parent), _Ending)
    except (OSError, ValueError, RecursionError):
        return None, 0
    return ending.status, ending.updates


def with_rounds(summary: Summary, rounds: Iterable[Round]) -> Summary:
    """Return the summary with rounds from `metrics.jsonl`, if it was recorded before samples were counted."""
    known = {one.version: one for one in rounds}
    points = summary.validation
    if not points or any(one.asked is not None or one.version not in known for one in points):
        return summary
    ordered = [known[one.version] for one in points]
    validation = tuple(ValidationPoint.of(one) for one in ordered)
    return msgspec.structs.replace(summary, validation=validation, validation_change=_change(ordered))


def _change(rounds: Sequence[Round]) -> Change | None:
    ends = first_and_last(rounds)
    try:
        return None if ends is None else compare(*ends)
    except NotComparable:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
