"""Defines the elements of a page: sections of charts, tables, facts and samples, as data that a browser draws.

A chart holds the numbers as they were recorded, without smoothing. A series of more than `MOST_POINTS` points is
thinned and keeps its extremes; the chart's note mentions it.
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
    """An axis: `label` and `unit` for people; `low` and `high` override the data's range."""

    label: str
    unit: str = ""
    low: float | None = None
    high: float | None = None


class Series(msgspec.Struct, frozen=True):
    """One curve, area or row of bars.

    x: name of an axis of the chart -> a position per value.
    y: null without a recorded value.
    low, high: a band around it.
    colour: a position in the palette of the page, or the name of a state (busy, ...).
    faint: whether it is one of several curves that a band summarizes.
    of: the number of points before thinning, if any."""

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
    """A chart. `hint` explains in one sentence how to read it; the first of `xs` is shown until another is chosen."""

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
    """A table; `searchable` adds a search field, and more than `fold` rows are folded."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    hint: str = ""
    searchable: bool = False
    fold: int = 12


class Fact(msgspec.Struct, frozen=True):
    """A number with its meaning; `detail` gives its uncertainty or its components."""

    label: str
    value: str
    detail: str = ""


class Facts(msgspec.Struct, frozen=True, tag="facts", tag_field="kind"):
    """Facts next to each other; `compact` ones have no frame."""

    items: list[Fact]
    compact: bool = False


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """A paragraph. `tone`: plain text, a warning, or a note that there is nothing to show."""

    text: str
    tone: Literal["plain", "warning", "nothing"] = "plain"


class Commands(msgspec.Struct, frozen=True, tag="commands", tag_field="kind"):
    """Commands to copy, each with its purpose."""

    items: list[tuple[str, str]]


class Gain(msgspec.Struct, frozen=True):
    """The gain of a change, as a fraction, and the half-width of its uncertainty. `how`: keys to set."""

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


class Stack(msgspec.Struct, frozen=True):
    """One bar; `values` in the order of the parts."""

    name: str
    values: list[float]


class Stacks(msgspec.Struct, frozen=True, tag="stacks", tag_field="kind"):
    """Bars of several parts on one scale. `parts`: name and colour of each, as in `Series`."""

    id: str
    title: str
    hint: str
    unit: str
    parts: list[tuple[str, int | str]]
    items: list[Stack]


class Frame(msgspec.Struct, frozen=True):
    """A sample's medium at one version. `src`: a data URI, an address of the live page, or empty for no medium.

    `text`: of a medium that is a text; it has no `src`."""

    version: int
    src: str = ""
    medium: Literal["image", "video", "audio", "text"] = "image"
    reward: float | None = None
    text: str = ""


class Strip(msgspec.Struct, frozen=True):
    """One prompt and noise across the versions, in their order. `question`: the address of the prompt's image."""

    prompt: str
    target: str | None
    frames: list[Frame]
    question: str = ""


class Samples(msgspec.Struct, frozen=True, tag="samples", tag_field="kind"):
    """Samples over time, with a slider.

    `values`: the reward of each version's round; `over`: the number of samples in it, unless all. `paired`: the first
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
    """The timeline, a lane per worker, drawn by `page/lanes.js`, which defines the format of `data`."""

    id: str
    title: str
    hint: str
    data: dict[str, Any]


class Details(msgspec.Struct, frozen=True, tag="details", tag_field="kind"):
    """Blocks that a reader opens by their `summary`."""

    summary: str
    blocks: list[Chart | Table | Text]


Block = Chart | Table | Facts | Text | Commands | Gains | Stacks | Samples | Lanes | Details


class Tab(msgspec.Struct, frozen=True):
    """The blocks of one run, in a section with separate blocks for every run."""

    run: str
    blocks: list[Block]


class Section(msgspec.Struct, frozen=True):
    """A part of the page, refreshed separately: a title, a sentence, blocks, and each run's own blocks.

    `folded`: a reader opens it by its title; until then `brief` is next to the title."""

    id: str
    title: str
    lead: str = ""
    blocks: list[Block] = []
    tabs: list[Tab] = []
    folded: bool = False
    brief: str = ""


def fold(section: Section) -> Section:
    """Return a folded section. Its brief is the first sentence of its only run's blocks, or of its common blocks."""
    blocks = section.tabs[0].blocks if len(section.tabs) == 1 else section.blocks
    brief = blocks[0].text if blocks and isinstance(blocks[0], Text) else ""
    return msgspec.structs.replace(section, folded=True, brief=brief)


def thinned(y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Return which points to show: all, or at most `most`, with the minimum and maximum of each stretch.

    The first and the last point are always included. A stretch without values contributes a gap."""
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
    """Return a series of all recorded values."""
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
    """Return a note about thinned series; empty if all points are drawn."""
    thin = [one for one in shown if one.of is not None]
    if not thin:
        return ""
    most = max(one.of or 0 for one in thin)
    return (
        f"Of up to {most:,} points per curve, at most {MOST_POINTS:,} are drawn: the least and the largest of every"
        " stretch. metrics.jsonl has all."
    )
