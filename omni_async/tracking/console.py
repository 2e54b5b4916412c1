"""Shows a run to a person or a pipe.

A pipe gets exactly one flushed line per update; a terminal gets a live display (live_console.py). Both, the final lines
and `omni-async status` format numbers by the functions here, so that one has the same label wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TextIO, TypedDict

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


class Console(Protocol):
    def phase(self, text: str) -> None:
        """Show the phase before the first update: `starting ray`, `loading engine`."""

    def update(self, view: UpdateView) -> None:
        """Show a finished update."""

    def validation(self, version: int, value: float, parts: dict[str, float]) -> None:
        """Show a finished validation round.

        Args:
            version: the policy that was validated.
            value: its mean reward.
            parts: means of the scorers' parts, by name."""

    def note(self, text: str) -> None:
        """Show a notice on a line of its own."""

    def close(self, last_words: Sequence[str] = ()) -> None:
        """End the display and leave these lines below it, unwrapped.

        Nothing more is shown; a second call changes nothing."""


class LineConsole:
    """Lines for pipes and log files: `update 12/120 reward 0.431 staleness 1.2 images/s 21.3 validation reward 0.520`.

    When the reader goes away (`| head`), output stops; the run goes on."""

    def __init__(self, stream: TextIO, total_updates: int) -> None:
        self._stream = stream
        self._total = total_updates
        self._validation: float | None = None
        self._closed = False

    def phase(self, text: str) -> None:
        self._line(text)

    def update(self, view: UpdateView) -> None:
        shown = {
            "reward": f"{view['reward']:.3f}" if "reward" in view else None,
            **{name: f"{value:.4g}" for name, value in view.get("extra", {}).items()},
            "staleness": f"{view['staleness']:.1f}" if "staleness" in view else None,
            "busy": " ".join(f"{role} {fraction:.0%}" for role, fraction in view.get("busy", {}).items()),
            "images/s": f"{view['images_per_s']:.1f}" if "images_per_s" in view else None,
            "validation reward": None if self._validation is None else f"{self._validation:.3f}",
        }
        words = (f"{name} {text}" for name, text in shown.items() if text)
        self._line(" ".join([f"update {view.get('update', '?')}/{self._total}", *words]))

    def validation(self, version: int, value: float, parts: dict[str, float]) -> None:
        self._validation = value
        self._line(validated(version, value, parts))

    def note(self, text: str) -> None:
        self._line(text)

    def close(self, last_words: Sequence[str] = ()) -> None:
        for line in last_words:
            self._write(indented(line))
        self._closed = True

    def _line(self, text: str) -> None:
        self._write(one_line(" ".join(text.split())))

    def _write(self, line: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream is closed
            self._closed = True


# ---- numbers for people ----------------------------------------------------------------------------------------------


def validated(version: int, value: float, parts: Mapping[str, float]) -> str:
    """Format `validation of version 20: reward 0.412, ocr_exact 0.278`.

    Args:
        version, value, parts: as `Console.validation` takes them."""
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
        noun, unit = ("", "") if said else (" group" + "s" * (groups != 1), " update" + "s" * (age != 1) + " old")
        said.append(f"{groups}{noun} {'is' if groups == 1 else 'are'} {age}{unit}")
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
