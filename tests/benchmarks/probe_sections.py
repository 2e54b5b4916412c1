"""Provides sections that measure, fail, run out of memory, die or hang."""

from __future__ import annotations

import os
import signal
import threading

from benchmarks.gpu_probe_run import Report, Section, Settings


def measures(settings: Settings, report: Report) -> None:
    report({"name": "layers", "value": settings.layers, "gib": 2.0})
    report({"name": "half", "seconds": 0.5, "gib": None})


def raises(settings: Settings, report: Report) -> None:
    report({"name": "before", "gib": 1.0})
    raise ValueError("no such kernel\nand more of it")


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's."""


def fills(settings: Settings, report: Report) -> None:
    raise OutOfMemoryError("tried to allocate 41 GiB")


def dies(settings: Settings, report: Report) -> None:
    report({"name": "before"})
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(settings: Settings, report: Report) -> None:
    threading.Event().wait()


def section(name: str, limit_s: float = 60.0) -> Section:
    return Section(f"{__name__}:{name}", limit_s, "")
