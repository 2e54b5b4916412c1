"""Measures what a run takes on its driver's machine: memory and CPU seconds of a process tree.

Memory is the proportional set size: shared pages are divided among their users. A local Ray's daemons and workers are
descendants of the driver that started it; a cluster joined by address is not.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import psutil

DRIVER, RAY = "driver", "ray"
# Reading the proportional size takes 20 ms per gigabyte: it is read when resident memory has grown by this factor, and
# every few measurements.
_GROWTH, _SKIPPED = 1.01, 4


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pss_of(processes: Sequence[psutil.Process]) -> int:
    """Return the bytes of processes; a process that ends meanwhile counts 0.

    If PSS is not available (not Linux, or another user's process), the resident size is used, which counts shared pages
    repeatedly."""
    return sum(map(_process_bytes, processes))


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
    except (psutil.AccessDenied, AttributeError):
        return _resident_bytes(process)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


class CpuAccount:
    """The CPU seconds of a process tree by role, those of ended processes included.

    A process must live during a measurement to count. Its seconds after its last measurement are missed."""

    def __init__(self) -> None:
        self._seconds: dict[psutil.Process, float] = {}
        self._roles: dict[psutil.Process, str] = {}

    def measure(self, family: Sequence[psutil.Process], roles: Mapping[int, str]) -> None:
        """Read the times of the processes that live now.

        Args:
            family: the driver, then its descendants, each after its parent.
            roles: the roles of workers by pid. A worker's descendants have its role. Other processes are Ray's, or the
                driver's if no worker is a separate process."""
        driver = family[0].pid if family else 0
        others = RAY if set(roles) - {driver} else DRIVER
        found: dict[int, str] = {}
        for process in family:
            try:
                with process.oneshot():
                    parent, times = process.ppid(), process.cpu_times()
            except psutil.Error:
                continue
            inherited = found.get(parent)
            if process.pid == driver:
                role = DRIVER
            elif process.pid in roles:
                role = roles[process.pid]
            elif inherited is not None and inherited not in (DRIVER, RAY):
                role = inherited
            else:
                # A worker that is being ended has lost its entry, and keeps its role.
                role = self._roles.get(process, others)
                role = others if role in (DRIVER, RAY) else role
            found[process.pid] = self._roles[process] = role
            self._seconds[process] = times.user + times.system

    def by_role(self) -> dict[str, float]:
        """Return role -> CPU seconds since each process began, the largest first."""
        total: dict[str, float] = defaultdict(float)
        for process, seconds in self._seconds.items():
            total[self._roles[process]] += seconds
        return dict(sorted(total.items(), key=lambda one: -one[1]))


class UsageSampler:
    """A thread that measures this process's tree every `interval_s`, from `start` to `stop`.

    `peak_bytes`: the largest memory. `roles`: returns the roles of workers by pid; set during the run."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._measuring = threading.Lock()
        self._thread = threading.Thread(target=self._measure_until_stopped, name="usage-sampler", daemon=True)
        self._cpu = CpuAccount()
        self._most_resident = self._skipped = 0
        self.peak_bytes = 0
        self.roles: Callable[[], Mapping[int, str]] = dict

    @property
    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds by role, as last measured."""
        with self._measuring:
            return self._cpu.by_role()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a last measurement."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.measure()

    def measure(self) -> None:
        """Measure now, such as before processes are ended."""
        with self._measuring:
            family = family_of(os.getpid())
            resident = sum(map(_resident_bytes, family))
            self._skipped += 1
            if resident > _GROWTH * self._most_resident or self._skipped > _SKIPPED:
                self._most_resident, self._skipped = max(resident, self._most_resident), 0
                self.peak_bytes = max(self.peak_bytes, pss_of(family))
            self._cpu.measure(family, self.roles())

    def _measure_until_stopped(self) -> None:
        self.measure()
        while not self._stopping.wait(self._interval_s):
            self.measure()
