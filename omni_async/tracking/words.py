"""Formats numbers of a run for people.

The live display, the lines of a log, the final lines and `omni-async status` all use these functions, so that a number
has the same label wherever it is shown. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from omni_async.config.redact import one_line
from omni_async.tracking.summary import ValidationPoint


class UpdateView(TypedDict, total=False):
    """The numbers shown of one update; unknown ones are left out.

    `staleness` is a mean, `staleness_counts` maps staleness -> groups, `buffers` name -> (held, capacity), `busy` role
    -> fraction, `extra` further numbers by name."""

    update: int
    reward: float
    staleness: float
    staleness_counts: dict[int, int]
    images_per_s: float
    buffers: dict[str, tuple[int, int]]
    busy: dict[str, float]
    extra: dict[str, float]


def validated(version: int, value: float, parts: Mapping[str, float]) -> str:
    """Format `validation of version 20: reward 0.412, ocr_exact 0.278`."""
    numbers = {"reward": value, **parts}
    return f"validation of version {version}: " + ", ".join(f"{name} {number:.3f}" for name, number in numbers.items())


def validation_curve(points: Sequence[ValidationPoint]) -> str:
    """Format the change of the numbers that the first and the last round have.

    As `validation of versions 0 to 100 (6 rounds): reward 0.412 -> 0.903, ocr_exact 0.278 -> 0.900`."""
    first, last = points[0], points[-1]
    if len(points) == 1:
        return validated(first.version, first.value, first.parts)
    both = {"reward": (first.value, last.value)}
    both |= {name: (value, last.parts[name]) for name, value in first.parts.items() if name in last.parts}
    changes = ", ".join(f"{name} {before:.3f} -> {after:.3f}" for name, (before, after) in both.items())
    return f"validation of versions {first.version} to {last.version} ({len(points)} rounds): {changes}"


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows of as many cells each with their columns aligned."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def staleness(mean: float, counts: Mapping[int, int]) -> str:
    """Format `1.2 updates on average: 3 groups are 1 update old, 1 is 2`. `counts`: staleness in updates -> groups."""
    said: list[str] = []
    for age, groups in sorted(counts.items()):
        verb = "is" if groups == 1 else "are"
        noun, unit = ("", "") if said else (" group" + "s" * (groups != 1), " update" + "s" * (age != 1) + " old")
        said.append(f"{groups}{noun} {verb} {age}{unit}")
    average = f"{mean:.1f} updates on average"
    return f"{average}: {', '.join(said)}" if said else average


def indented(line: str) -> str:
    """Return the line as `one_line` does, with its leading spaces."""
    return " " * (len(line) - len(line.lstrip(" "))) + one_line(line)


def duration(seconds: float) -> str:
    """Format seconds to two units: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    for unit, size, smaller, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
