"""Defines what a page is made of: sections of charts, tables, facts and samples, as data that a browser draws.

A chart holds the numbers as they were recorded. Nothing is smoothed; a series of more than `MOST_POINTS` is thinned,
keeps its extremes, and says so in the chart's note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from omni_async.types import finite

MOST_POINTS = 2000
Cell = str | float | int | None
T = TypeVar("T")


class Axis(msgspec.Struct, frozen=True):
    """An axis: `label` and `unit` for people; `low` and `high` where the scale is not the data's."""

    label: str
    unit: str = ""
    low: float | None = None
    high: float | None = None


class Series(msgspec.Struct, frozen=True):
    """One curve, area or row of bars.

    `x`: name of an axis of the chart -> a position per value. `y`: null where nothing was recorded. `low`, `high`: a
    band around it. `colour`: a position in the palette of the page, or the name of a state (busy, ...). `faint`: one
    of several that a band sums up. `of`: how many points there are, if they were thinned."""

    name: str
    x: dict[str, list[float]]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    colour: int | str = 0
    faint: bool = False
    of: int | None = None


class Mark(msgspec.Struct, frozen=True):
    """A horizontal line with a meaning: a capacity, a limit."""

    label: str
    value: float


class Chart(msgspec.Struct, frozen=True, tag="chart", tag_field="kind"):
    """A chart. `hint` says in one sentence how to read it; the first of `xs` is shown until another is chosen."""

    id: str
    title: str
    hint: str
    xs: dict[str, Axis]
    y: Axis
    series: list[Series]
    form: Literal["line", "area", "bar"] = "line"
    stacked: bool = False
    marks: list[Mark] = []
    wide: bool = False
    note: str = ""


class Table(msgspec.Struct, frozen=True, tag="table", tag_field="kind"):
    """A table; `searchable` ones get a search field, and those with more than `fold` rows are folded."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    hint: str = ""
    searchable: bool = False
    fold: int = 12


class Fact(msgspec.Struct, frozen=True):
    """A number with its meaning; `detail` says how sure it is, or what it is made of."""

    label: str
    value: str
    detail: str = ""


class Facts(msgspec.Struct, frozen=True, tag="facts", tag_field="kind"):
    items: list[Fact]


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """A paragraph. `tone`: what it is: a plain one, a warning, or that there is nothing to show."""

    text: str
    tone: Literal["plain", "warning", "nothing"] = "plain"


class Commands(msgspec.Struct, frozen=True, tag="commands", tag_field="kind"):
    """Commands to copy, each with what it is for."""

    items: list[tuple[str, str]]


class Gain(msgspec.Struct, frozen=True):
    """What a change would gain, as a fraction, and the half-width of what is not known of it. `how`: keys to set."""

    name: str
    how: str
    gain: float
    uncertainty: float


class Gains(msgspec.Struct, frozen=True, tag="gains", tag_field="kind"):
    """Predicted gains, a bar each with its uncertainty."""

    id: str
    title: str
    hint: str
    items: list[Gain]


class Frame(msgspec.Struct, frozen=True):
    """A sample's medium at one version. `src`: a data URI, or an address of the live page; empty if there is none."""

    version: int
    src: str = ""
    medium: Literal["image", "video", "audio"] = "image"
    reward: float | None = None


class Strip(msgspec.Struct, frozen=True):
    """One prompt and noise through the versions, in their order."""

    prompt: str
    target: str | None
    frames: list[Frame]


class Samples(msgspec.Struct, frozen=True, tag="samples", tag_field="kind"):
    """Samples over time, with a slider.

    `values`: the reward of each version's round, `over`: the samples in it, unless they are all. `paired`: the first
    version is shown next to the chosen one. `pixelated`: small images, enlarged without smoothing."""

    id: str
    versions: list[int]
    strips: list[Strip]
    values: list[float | None]
    over: list[str]
    paired: bool = True
    pixelated: bool = False
    note: str = ""


class Lanes(msgspec.Struct, frozen=True, tag="lanes", tag_field="kind"):
    """The timeline, a lane per worker, which `page/lanes.js` draws: its data are that file's."""

    id: str
    title: str
    hint: str
    data: dict[str, Any]


Block = Chart | Table | Facts | Text | Commands | Gains | Samples | Lanes


class Tab(msgspec.Struct, frozen=True):
    """The blocks of one run, where every run has its own."""

    run: str
    blocks: list[Block]


class Section(msgspec.Struct, frozen=True):
    """A part of the page, refreshed by itself: a title, a sentence, blocks, and those of each run."""

    id: str
    title: str
    lead: str = ""
    blocks: list[Block] = []
    tabs: list[Tab] = []


def thinned(y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Return which points to show: all, or at most `most`, with the least and the largest of each stretch.

    The first and the last point are always among them; so is a gap, where a stretch is nothing else."""
    count = len(y)
    if count <= most:
        return [*range(count)]
    keep = {0, count - 1}
    stretches = max(1, (most - 2) // 2)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        there = [i for i in stretch if y[i] is not None]
        found = there or [stretch.start]
        keep |= {min(found, key=lambda i: y[i] or 0.0), max(found, key=lambda i: y[i] or 0.0)}
    return sorted(keep)


def series(name: str, x: dict[str, list[float]], y: Iterable[Any], colour: int | str = 0) -> Series:
    """Return a series of recorded values, all of them."""
    return Series(name, x, [finite(value) for value in y], colour=colour)


def thin(one: Series) -> Series:
    """Return a series with as many of its points as a chart draws."""
    kept = thinned(one.y)
    if len(kept) == len(one.y):
        return one

    def chosen(values: list[T] | None) -> list[T] | None:
        return None if values is None else [values[i] for i in kept]

    return msgspec.structs.replace(
        one,
        x={axis: [positions[i] for i in kept] for axis, positions in one.x.items()},
        y=[one.y[i] for i in kept],
        low=chosen(one.low),
        high=chosen(one.high),
        of=len(one.y),
    )


def thinning_note(shown: Iterable[Series]) -> str:
    """Say what was thinned; nothing if all points are there."""
    thin = [one for one in shown if one.of is not None]
    if not thin:
        return ""
    most = max(one.of or 0 for one in thin)
    return (
        f"Of up to {most:,} points per curve, at most {MOST_POINTS:,} are drawn: the least and the largest of every"
        " stretch. metrics.jsonl has all."
    )
