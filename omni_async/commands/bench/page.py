"""Shows a benchmark as a page: the seconds saved per update and their causes, then every arm, on the report's page."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async import __version__
from omni_async.commands.bench.comparison import CATEGORIES, answer, compare
from omni_async.commands.bench.result import Overlap
from omni_async.commands.bench.table import (
    cause_rows,
    details,
    emulated_devices,
    headline,
    notes,
    number,
    rounded,
    sections,
)
from omni_async.commands.report.blocks import Block, Commands, Fact, Facts, Section, Stack, Stacks, Table, Text
from omni_async.commands.report.file import one_file

# A colour of the style sheet for every category.
_COLOURS: dict[str, int | str] = {
    "training": 0,
    "recompute": 3,
    "export": 7,
    "generation": 1,
    "tail": 4,
    "switch": 6,
    "reward": 2,
    "weights": 5,
    "idle": "nothing",
}


def page(overlap: Overlap) -> str:
    """Return the HTML of one file that loads nothing."""
    return one_file(page_of(overlap))


def page_of(overlap: Overlap) -> dict[str, Any]:
    """Return the page's data, as `omni_async.commands.report.data.page_of` does for runs."""
    shown = [_answer(overlap), _arms(overlap), _setup(overlap)]
    return {
        "title": f"overlap of {overlap.recipe}",
        "made": overlap.started,
        "version": __version__,
        "runs": [],
        "sections": msgspec.to_builtins(shown),
    }


def _answer(overlap: Overlap) -> Section:
    marked = emulated_devices(overlap)
    blocks: list[Block] = [Text(f"{marked}.", "warning")] if marked else []
    if (found := answer(compare(overlap))) is not None:
        before, after, saved = rounded([found.before_s, found.after_s, found.before_s - found.after_s])
        spread = f"quartiles {number(found.ratio.low)} to {number(found.ratio.high)}" if found.rounds > 1 else ""
        of_round, of_all = "", ""
        if found.rounds > 1:  # the other tiles are of one round, so that they add up
            of_round, of_all = f", round {found.round + 1}", f", median of {found.rounds} rounds"
        blocks.append(
            Facts(
                [
                    Fact(f"saved per update{of_round}", f"{saved} s"),
                    Fact(f"an update of {found.baseline}{of_round}", f"{before} s"),
                    Fact(f"an update of {found.arm}{of_round}", f"{after} s"),
                    Fact(f"times as fast{of_all}", f"{found.ratio.median:.2f}", spread),
                ]
            )
        )
        columns, rows = cause_rows(found)
        hint = "Every moment of an update has one cause, seen from the trainer; the last row is the sum."
        blocks.append(Table("causes", "", columns, [[*row] for row in rows], hint))
        blocks.append(Text(" ".join(f"{detail}." for detail in details(overlap))))
    return Section("verdict", headline(overlap), blocks=blocks)


def _arms(overlap: Overlap) -> Section:
    summaries = compare(overlap)
    used = [name for name in CATEGORIES if any(arm.attribution[name] > 0 for arm in summaries.values())]
    stacks = Stacks(
        "arms",
        "Seconds per update, from the trainer's view",
        "Of each arm's repeat with the median step time.",
        "s",
        [(CATEGORIES[name], _COLOURS[name]) for name in used],
        [Stack(name, [arm.attribution[name] for name in used]) for name, arm in summaries.items()],
    )
    names = [arm.name for arm in overlap.arms]
    tables = [
        Table(f"arms-{place}", part.title, ["arm", *names], [[label, *cells] for label, cells in part.rows], fold=20)
        for place, part in enumerate(sections(overlap))
    ]
    return Section("arms", "Every arm", blocks=[*([stacks] if summaries else []), *tables])


def _setup(overlap: Overlap) -> Section:
    texts = [Text(f"{note}.") for note in notes(overlap)]
    return Section("setup", "Notes", blocks=[*texts, Commands([(overlap.command, "The command of this benchmark:")])])
