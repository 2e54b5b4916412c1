"""Shows a run's operation: costs of scorers, fill levels of buffers, faults, and the endings of groups."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from msgspec.structs import replace

from omni_async.commands.report.blocks import (
    Axis,
    Block,
    Cell,
    Chart,
    Mark,
    Section,
    Series,
    Table,
    Text,
    thinning_note,
)
from omni_async.commands.report.numbers import number, seconds
from omni_async.commands.report.seeds import with_bands
from omni_async.commands.report.shown import Shown, axes, tabs
from omni_async.config.section import size_text
from omni_async.types import finite

_SCORER = re.compile(r"scorer/(?P<label>.+)/calls")
_DEVICE = re.compile(r"device/(\d{1,6})/(\w+)")
_MOST_REASONS = 50
_MOST_SCORERS = 64
_MOST_DEVICES = 64  # of a run
_MOST_ROWS = 1000


def throughput(shown: Sequence[Shown]) -> Section:
    """Return the section with the speed of the runs."""
    wanted = (
        ("images_per_s", "Samples per second", "1/s", "Generated training samples, over the last 30 seconds."),
        (
            "tokens_per_s",
            "Tokens per second",
            "1/s",
            "Generated answers times the mean length of trained ones, over the last 30 seconds.",
        ),
        ("answer_tokens/median", "Median length of answers", "tokens", "Of an update's answers."),
        ("answer_tokens/p95", "Length of long answers", "tokens", "One in twenty of an update's answers is longer."),
        ("answer_versions", "Versions inside an answer", "", "Mean over an update's answers."),
        ("update_s", "Seconds per update", "s", "From the start of the update to its end, waiting included."),
    )
    blocks: list[Block] = []
    for key, title, unit, hint in wanted:
        curves = with_bands([one for one in shown if one.has(key)], lambda one: one.points(key))  # noqa: B023
        if any(curve.y for curve in curves):
            chart = Chart(
                f"metric-{key.replace('/', '-')}",
                title,
                hint,
                axes(),
                Axis("", unit, low=0),
                curves,
                note=thinning_note(curves),
            )
            blocks.append(chart)
    blocks += _accelerators(shown)
    return Section("throughput", "Speed", blocks=blocks or [Text("There is no update yet.", "nothing")])


def _accelerators(shown: Sequence[Shown]) -> list[Block]:
    """Return charts of the memory and the utilisation of each run's accelerators; none for runs without any."""
    wanted = (
        ("memory_bytes", 2**30, "Memory of accelerators", "GiB", "In use by all processes when an update ended."),
        (
            "utilisation",
            0.01,
            "Utilisation of accelerators",
            "%",
            "Busy share of the 30 seconds before an update ended.",
        ),
    )
    blocks: list[Block] = []
    for key, scale, title, unit, hint in wanted:
        curves: list[Series] = []
        for one in shown:
            for device in _devices(one, key):
                name = device if len(shown) == 1 else f"{one.label}, {device}"
                curve = one.curve(f"device/{device}/{key}", name)
                scaled = [None if value is None else value / scale for value in curve.y]
                curves.append(replace(curve, y=scaled, colour=len(curves)))
        if curves:
            name, note = f"device-{key.partition('_')[0]}", thinning_note(curves)
            blocks.append(Chart(name, title, hint, axes(), Axis("", unit, low=0), curves, note=note))
    return blocks


def _devices(one: Shown, key: str) -> list[str]:
    """Return the numbers of the accelerators that have this metric."""
    names = {name for line in one.run.updates for name in line}
    found = (_DEVICE.fullmatch(name) for name in names)
    return sorted((match[1] for match in found if match and match[2] == key), key=int)[:_MOST_DEVICES]


# ---- scorers ---------------------------------------------------------------------------------------------------------


def scorers(shown: Sequence[Shown]) -> Section:
    """Return the section with every scorer's calls and times."""
    lead = "An answer's time has the wait for a call in it; the call's own time is what the scorer costs."
    return Section("scorers", "What rewards cost", lead, tabs=tabs(shown, _scorers))


def _scorers(one: Shown) -> list[Block]:
    lines = one.run.updates
    keys = dict.fromkeys(key for line in lines for key in line)
    labels = sorted(match["label"] for key in keys if (match := _SCORER.fullmatch(key)))[:_MOST_SCORERS]
    if not labels:
        return [Text("No scorer was recorded.", "nothing")]
    rows: list[list[Cell]] = []
    blocks: list[Block] = []
    for label in labels:
        sums = {
            name: _sum(lines, f"scorer/{label}/{name}") for name in ("calls", "samples", "failed", "cached", "tokens")
        }
        times = {name: _median(lines, f"scorer/{label}/{name}/p50") for name in ("call_s", "answer_s")}
        calls = f"{number(times['call_s'])} s" if times["call_s"] is not None else None
        answers = f"{number(times['answer_s'])} s" if times["answer_s"] is not None else None
        rows.append([label, *(f"{value:,.0f}" for value in sums.values()), calls, answers])
        curves = [one.curve(f"scorer/{label}/answer_s/{p}", name=p) for p in ("p50", "p95", "p99")]
        shaded = [replace(curve, colour=f"age-{n / 2:.3f}") for n, curve in enumerate(curves)]
        if any(curve.y for curve in shaded):
            hint = "Seconds from asking for a sample to its answer: half, 95 % and 99 % of them were quicker."
            y = Axis("", "s", low=0)
            blocks.append(
                Chart(
                    f"scorer-{label}",
                    f"{label}: time to an answer",
                    hint,
                    axes(),
                    y,
                    shaded,
                    note=thinning_note(shaded),
                )
            )
    columns = ["scorer", "calls", "samples", "failed", "from cache", "tokens", "median call", "median answer"]
    hint = "Sums over the run; times are medians over updates of each update's median."
    return [Table("scorers", "Scorers", columns, rows, hint), *blocks]


def _sum(lines: Sequence[dict[str, Any]], key: str) -> float:
    return sum(finite(line.get(key)) or 0.0 for line in lines)


def _median(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [value for line in lines if (value := finite(line.get(key))) is not None]
    return median(values) if values else None


# ---- buffers ---------------------------------------------------------------------------------------------------------


def buffers(shown: Sequence[Shown]) -> Section:
    """Return the section with the fill levels of the bounded buffers."""
    lead = "A full trajectory buffer holds engines back; a full replay buffer holds the admission of groups back."
    return Section("buffers", "Buffers", lead, tabs=tabs(shown, _buffers))


def _buffers(one: Shown) -> list[Block]:
    wanted = (
        (
            "buffers/trajectories",
            "Trajectories",
            "samples",
            "buffer.trajectories",
            "Places taken by samples under way.",
        ),
        (
            "buffers/replay",
            "Replay buffer",
            "groups",
            "buffer.groups",
            "Places taken by groups from their admission until the trainer takes them.",
        ),
        (
            "buffers/bytes_held/max",
            "Memory of live samples",
            "MB",
            "",
            "The most that trajectories and media held at a time, per update.",
        ),
    )
    blocks: list[Block] = []
    for key, title, unit, setting, hint in wanted:
        curve = one.curve(key, name=title)
        if not curve.y:
            continue
        if unit == "MB":
            curve.y[:] = [None if value is None else value / 1e6 for value in curve.y]
        capacity = one.run.setting(setting) if setting else None
        marks = [Mark(f"capacity {capacity}", float(capacity))] if isinstance(capacity, int) else []
        y = Axis("", unit, low=0)
        blocks.append(
            Chart(
                f"metric-{key.replace('/', '-')}",
                title,
                hint,
                axes(),
                y,
                [curve],
                marks=marks,
                note=thinning_note([curve]),
            )
        )
    bound = one.run.setting("buffer.max_bytes")
    if isinstance(bound, int):
        blocks.append(Text(f"buffer.max_bytes is {size_text(bound)}."))
    return blocks or [Text("There is no update yet.", "nothing")]


# ---- faults and endings ----------------------------------------------------------------------------------------------


def faults(shown: Sequence[Shown]) -> Section:
    """Return the section with lost and recovered parts, and with attempts."""
    return Section("faults", "Faults and attempts", tabs=tabs(shown, _faults))


def _faults(one: Shown) -> list[Block]:
    blocks: list[Block] = []
    if one.run.faults:
        rows: list[list[Cell]] = [
            [_at(fault.time), fault.part, fault.reason, fault.replacement, seconds(fault.seconds)]
            for fault in one.run.faults[-_MOST_ROWS:]
        ]
        columns = ["noticed", "part", "reason", "replaced by", "back after"]
        blocks.append(Table("faults", "Parts that were lost and came back", columns, rows))
    else:
        blocks.append(Text("Nothing was lost.", "nothing"))
    if one.run.attempts:
        rows = [
            [_at(each.began), _at(each.ended), each.status, each.reason, each.from_update, each.to_update]
            for each in one.run.attempts[-_MOST_ROWS:]
        ]
        columns = ["began", "ended", "status", "reason", "from update", "to update"]
        blocks.append(Table("attempts", "Attempts that came to an end", columns, rows))
    return blocks


def endings(shown: Sequence[Shown]) -> Section:
    """Return the section with the endings of admitted groups, and the reasons for groups that were not trained."""
    lead = "Every admitted group ends exactly once: trained, rejected (its reward taught nothing or failed) or dropped."
    return Section("endings", "How groups ended", lead, tabs=tabs(shown, _endings))


def _endings(one: Shown) -> list[Block]:
    events = Counter(line.event for line in one.run.ledger)
    if not events:
        return [Text("No group has ended yet.", "nothing")]
    total = events.total()
    rows: list[list[Cell]] = [[event, f"{count:,}", f"{count / total:.1%}"] for event, count in events.most_common()]
    blocks: list[Block] = [Table("endings", "Endings", ["ending", "groups", "share"], rows)]
    reasons = Counter((line.event, line.reason) for line in one.run.ledger if line.reason is not None)
    if reasons:
        rows = [[event, reason, f"{count:,}"] for (event, reason), count in reasons.most_common(_MOST_REASONS)]
        hint = f"The {_MOST_REASONS} most frequent of {len(reasons):,}." if len(reasons) > _MOST_REASONS else ""
        blocks.append(Table("reasons", "Why groups were not trained", ["ending", "reason", "groups"], rows, hint))
    without = Counter(scorer for line in one.run.ledger for scorer in line.left_out)
    if without:
        rows = [[scorer, f"{count:,}"] for scorer, count in without.most_common(_MOST_SCORERS)]
        hint = "It gave no value for a sample of the group, so no reward of the group includes it."
        blocks.append(Table("without", "Scorers left out of a group's rewards", ["scorer", "groups"], rows, hint))
    again = Counter(line.attempts for line in one.run.ledger)
    if len(again) > 1:
        rows = [[times, f"{count:,}"] for times, count in sorted(again.items())[:_MOST_ROWS]]
        hint = "The most generations that any sample of a group needed; 1 if nothing failed."
        blocks.append(Table("again", "Samples generated again", ["generations", "groups"], rows, hint))
    return blocks


def _at(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "-"
