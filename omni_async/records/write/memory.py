"""Measures the memory that a run takes: the proportional set size of a process tree.

Shared pages are divided among their users.
"""

from __future__ import annotations

import os
import threading

import psutil


def process_tree_pss(pid: int) -> int:
    """Return the bytes of a process and all its descendants; processes that end meanwhile count 0.

    If PSS is not available (not Linux, or another user's process), the resident size is used, which counts shared pages
    repeatedly. A local Ray's daemons and workers are descendants of the driver that started it; a cluster joined by
    address is not."""
    try:
        root = psutil.Process(pid)
        return sum(_process_bytes(process) for process in (root, *root.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
    except (psutil.AccessDenied, AttributeError):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class MemorySampler:
    """A thread that measures this process's tree every `interval_s`, from `start` to `stop`; `peak_bytes`: maximum."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._measure_until_stopped, name="memory-sampler", daemon=True)
        self.peak_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """End the thread after a last measurement; return the peak."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._measure()
        return self.peak_bytes

    def _measure_until_stopped(self) -> None:
        self._measure()
        while not self._stopping.wait(self._interval_s):
            self._measure()

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, process_tree_pss(os.getpid()))
