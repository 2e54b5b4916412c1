"""Measures the stages of a run's start, and formats them for `omni-async train --timing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import psutil

from omni_async.aio.clock import WallClock

PROCESS, BUILD, LOAD, WORKERS = "process", "build", "load", "workers"


class Stage(NamedTuple):
    """A stage of a start: its name, its seconds, and the CPU seconds that the process and its children used in it."""

    name: str
    wall_s: float
    cpu_s: float


class StartClock:
    """Divides the time since this process was created into stages."""

    def __init__(self) -> None:
        self._process, self._clock = psutil.Process(), WallClock()
        self._last = self._process.create_time(), 0.0
        self.stages: list[Stage] = []

    def end(self, name: str) -> None:
        """End a stage, which began when the previous stage ended."""
        now = self._clock.now(), self._cpu_s()
        self.stages.append(Stage(name, *(max(0.0, b - a) for a, b in zip(self._last, now, strict=True))))
        self._last = now

    def _cpu_s(self) -> float:
        used = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used


class StartTiming:
    """The stages of a command's start, and of its workers. `show` shows them once, if `wanted`."""

    def __init__(self, wanted: bool = False) -> None:
        self._wanted = wanted
        self._driver = StartClock()

    def end(self, stage: str) -> None:
        """End a stage of this process."""
        if self._wanted:
            self._driver.end(stage)

    def show(self, stage: str, workers: Mapping[str, Sequence[Stage]], show_line: Callable[[str], None]) -> None:
        """End the last stage; show the total, the stages of each process, and the slowest path through them.

        Args:
            stage: the last one of this process.
            workers: their stages by name. Workers that load something come in the order of their readiness.
            show_line: receives each line."""
        if not self._wanted:
            return
        self.end(stage)
        self._wanted = False
        driver = self._driver.stages
        show_line(f"start-up took {sum(stage.wall_s for stage in driver):.1f} s; CPU seconds in brackets")
        for name, stages in {"driver": driver, **workers}.items():
            show_line(f"{name}: " + ", ".join(f"{one.name} {one.wall_s:.1f} s ({one.cpu_s:.1f})" for one in stages))
        loaded = [name for name, stages in workers.items() if stages[-1].name == LOAD]
        path = (f"{loaded[-1] if loaded and one.name == WORKERS else one.name} {one.wall_s:.1f} s" for one in driver)
        show_line(f"slowest path: {', '.join(path)}")
