"""Draws the live display of a terminal: progress with the time left, reward, staleness, buffers, and a bar per role.

`for_stream` chooses between this display and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from omni_async.config.redact import one_line, redact_text
from omni_async.records.write.console import (
    Console,
    LineConsole,
    UpdateView,
    indented,
    staleness,
    validated,
    validation_reward,
)
from omni_async.records.write.summary import ValidationPoint

_BAR_WIDTH = 24
_REFRESH_PER_S = 4


def for_stream(stream: TextIO, total_updates: int, done: int = 0) -> Console:
    """Return the console for the stream: a live display for a terminal, otherwise lines.

    Args:
        stream: the output.
        total_updates: `trainer.updates`.
        done: updates that earlier attempts of the run have made."""
    if stream.isatty():
        return LiveConsole(stream, total_updates, done)
    return LineConsole(stream, total_updates)


class LiveConsole:
    """A display that updates its numbers in place, with phases, notes and validations scrolling above it.

    `done`: updates of earlier attempts, where the bar starts; the remaining time follows from this attempt's pace."""

    def __init__(self, stream: TextIO, total_updates: int, done: int = 0) -> None:
        self._rich = RichConsole(file=stream, highlight=False)
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        columns = (MofNCompleteColumn(), BarColumn(None), *times)
        self._progress = Progress(TextColumn("update"), *columns, console=self._rich, speed_estimate_period=600.0)
        self._task = self._progress.add_task("updates", total=total_updates, completed=done, start=False)
        self._view: UpdateView = {}
        self._validation: str | None = None
        self._live = Live(
            console=self._rich, get_renderable=self._render, refresh_per_second=_REFRESH_PER_S, redirect_stdout=False
        )
        self._live.start()

    def phase(self, text: str) -> None:
        self._rich.print(Text(one_line(redact_text(text)), style="dim"))

    def update(self, view: UpdateView) -> None:
        self._view = view
        if not self._progress.tasks[0].started:
            self._progress.start_task(self._task)
        if "update" in view:
            self._progress.update(self._task, completed=view["update"])
        self._live.refresh()

    def validation(self, point: ValidationPoint) -> None:
        self._validation = f"{validation_reward(point) or 'none'} (version {point.version})"
        self._rich.print(Text(one_line(validated(point)), style="bold"))

    def note(self, text: str) -> None:
        self._rich.print(Text(one_line(redact_text(text))))

    def close(self, last_words: Sequence[str] = ()) -> None:
        self._live.stop()
        for line in last_words:
            self._rich.print(Text(indented(line)), soft_wrap=True)  # a wrapped path cannot be copied

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, cell in self._rows():
            table.add_row(Text(one_line(name), style="dim"), cell)
        return Group(self._progress, table)

    def _rows(self) -> list[tuple[str, RenderableType]]:
        view = self._view
        rows: list[tuple[str, RenderableType]] = []
        if "reward" in view:
            rows.append(("reward", Text(f"{view['reward']:.3f}", style="bold green")))
        if self._validation is not None:
            rows.append(("validation reward", Text(self._validation)))
        if "images_per_s" in view:
            rows.append((view.get("rate_unit", "images/s"), Text(f"{view['images_per_s']:.1f}")))
        if "staleness" in view:
            rows.append(("staleness", Text(staleness(view["staleness"], view.get("staleness_counts", {})))))
        buffers, busy = view.get("buffers", {}), view.get("busy", {})
        rows += [(name, _bar(held, capacity, f"{held}/{capacity}")) for name, (held, capacity) in buffers.items()]
        rows += [(f"{role} busy", _bar(fraction, 1.0, f"{fraction:.0%}")) for role, fraction in busy.items()]
        rows += [(name, Text(f"{value:.4g}")) for name, value in view.get("extra", {}).items()]
        rows += [(ending, Text(one_line(text))) for ending, text in view.get("left_out", {}).items()]
        return rows


def _bar(value: float, total: float, label: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=max(total, 1e-9), completed=value, width=_BAR_WIDTH), label)
    return row
