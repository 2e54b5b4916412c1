"""Shows a running staleness experiment: a line per cell that ended and, on a terminal, a bar under them."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from benchmarks.staleness_plan import Cell, Plan
from omni_async.tracking.summary import read_summary

_TAIL = 15


class Progress:
    """The display of `total` cells, of which `todo` are to be run, `parallel` at a time."""

    def __init__(self, plan: Plan, total: int, todo: int, parallel: int, console: Console | None = None) -> None:
        console = console or Console(highlight=False, markup=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("starting", total=total, completed=total - todo)
        self._total, self._left, self._parallel = total, todo, parallel
        self._began = time.monotonic()
        self._running: dict[str, float] = {}
        self._seconds: list[float] = []
        self._interrupted = False
        self._say(
            f"{total} cells, {total - todo} of them complete, {parallel} at a time; {plan.updates} updates each;"
            f" {plan.out}"
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, name: str) -> None:
        self._running[name] = time.monotonic()
        self._show()

    def ended(self, cell: Cell, run: Path | None, code: int, seconds: float, log: Path) -> bool:
        """Prints a cell that ended. `run`: the complete run folder it left, if it did. Returns False if it failed."""
        del self._running[cell.name]
        failed = run is None and not self._interrupted
        self._left -= run is not None or failed
        position = f"{self._total - self._left}/{self._total} {cell.name}"
        if run is not None:
            self._seconds.append(seconds)
            self._say(f"{position}: done in {seconds:.0f} s, {_scores(run)}{self._estimate()}")
        elif failed:
            self._say(f"{position}: FAILED with exit code {code} after {seconds:.0f} s; {log} ends:")
            self._say("\n".join(f"  | {line}" for line in tail(log, _TAIL)))
        else:
            self._say(f"{cell.name}: cut off after {seconds:.0f} s")
        self._show()
        return not failed

    def interrupted(self, children: int) -> None:
        again = self._interrupted
        self._interrupted = True
        what = "killing" if again else "waiting for"
        self._say(f"interrupted: {what} {children} runs{'' if again else ' to end in order (once more: kill them)'}")

    def _estimate(self) -> str:
        elapsed = time.monotonic() - self._began
        mean = sum(self._seconds) / len(self._seconds)
        under_way = sum(min(mean, time.monotonic() - began) for began in self._running.values())
        left = (mean * self._left - under_way) / self._parallel
        return f"; elapsed {_clock(elapsed)}" + (f", about {_clock(left)} left" if self._left else "")

    def _show(self) -> None:
        self._bar.update(
            self._task, completed=self._total - self._left, description=", ".join(self._running) or "ending"
        )

    def _say(self, text: str) -> None:
        self._bar.console.print(text)


def tail(log: Path, lines: int) -> list[str]:
    """Returns the last lines of a text file; for an unreadable one, a line that says so."""
    try:
        with log.open(encoding="utf-8", errors="reposition") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=lines)] or ["(nothing)"]
    except OSError as error:
        return [f"({error.strerror or error})"]


def _scores(run: Path) -> str:
    summary = read_summary(run / "summary.json")
    ends = {"reward": summary.last_reward, "validation": summary.validation[-1].value if summary.validation else None}
    return ", ".join(f"{name} {value:.3f}" for name, value in ends.items() if value is not None)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
