"""Shows a running benchmark: a line per finished run and, on a terminal, a bar with the run's updates under them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from omni_async.commands.bench.plan import Job, Plan
from omni_async.commands.bench.result import RunRecord
from omni_async.records.write.console import UpdateView
from omni_async.records.write.summary import ValidationPoint

_REFRESH_PER_S = 2  # the display runs concurrently with the measured job


class Progress:
    """The display of `total` runs; some may be complete already.

    A context manager; `console_of` gives the console of one run."""

    def __init__(self, total: int, console: rich.console.Console) -> None:
        runs = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
        self._bar = Bar(
            TextColumn("{task.description}"),
            *runs,
            console=console,
            disable=not console.is_terminal,
            transient=True,
            refresh_per_second=_REFRESH_PER_S,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._total, self._ended = total, 0
        self._began = time.monotonic()
        self._seconds: list[float] = []

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def print_plan(self, plan: Plan, predicted: dict[str, float]) -> None:
        """Print the arms with their buffers' capacities and, if known, their predicted seconds per update."""
        for planned in plan.arms:
            name, config = f"{planned.arm.name:<15}", planned.config
            if config is None:
                self.print_line(f"{name} skipped: {planned.skipped}")
                continue
            law = f", law {predicted[planned.arm.name]:.3g} s per update" if planned.arm.name in predicted else ""
            self.print_line(
                f"{name} S = {config.staleness.max_updates}, {config.rollout.workers} engines, {config.reward.workers}"
                f" reward workers, {config.trainer.workers} ranks; buffer.groups {config.buffer.groups},"
                f" buffer.trajectories {config.buffer.trajectories}{law}"
            )
        self.print_line(
            f"{self._total} runs of up to {plan.base.trainer.updates} updates, interleaved in {plan.repeats} rounds;"
            f" {plan.out}"
        )

    def console_of(self, job: Job) -> RunConsole:
        return RunConsole(self, f"{job.arm.name}, round {job.round + 1}", job.config.trainer.updates)

    def show(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def print_run(self, job: Job, record: RunRecord, seconds: float | None) -> None:
        """Print a finished run.

        Args:
            job: its arm and round.
            record: its measurements, or why it failed.
            seconds: its duration; None if it was complete before."""
        self._ended += 1
        if seconds is not None:
            self._seconds.append(seconds)
        self._bar.update(self._task, completed=self._ended)
        position = f"{self._ended}/{self._total} {job.arm.name} round {job.round + 1}"
        if record.measured is None:
            self.print_line(f"{position}: FAILED: {record.reason}")
        else:
            took = "complete already" if seconds is None else f"in {seconds:.0f} s"
            self.print_line(f"{position}: {record.measured.step_s:.3g} s per update, {took}{self._left()}")

    def _left(self) -> str:
        elapsed, left = f"; elapsed {_clock(time.monotonic() - self._began)}", self._total - self._ended
        if not (left and self._seconds):
            return elapsed
        return f"{elapsed}, about {_clock(left * sum(self._seconds) / len(self._seconds))} left"

    def print_line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunConsole:
    """One run's `tracking.console.Console`: its updates move the bar, everything else is silent."""

    def __init__(self, progress: Progress, name: str, updates: int) -> None:
        self._progress = progress
        self._name = name
        self._updates = updates

    def phase(self, text: str) -> None:
        self._progress.show(f"{self._name}: starting")

    def update(self, view: UpdateView) -> None:
        self._progress.show(f"{self._name}: update {view.get('update', '?')}/{self._updates}")

    def validation(self, point: ValidationPoint) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self, last_words: Sequence[str] = ()) -> None:
        pass


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
