"""Runs commands as child processes, some at a time, in order, until all have ended or the user interrupts.

Waits for: a child to end. Ctrl-C (also SIGTERM, and SIGHUP of a closing terminal) starts no further child and sends
SIGINT to those that run, which end in order and keep what they have; a second one kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """A command to run. `log` is written anew, with everything the child prints."""

    name: str
    command: tuple[str, ...]
    log: Path


class Pool:
    """A pool of child processes. `started(job)` and `ended(job, exit code, seconds)` are called as it happens,
    `interrupted(children at work)` once per signal. Children inherit the file descriptors in `keep_open`. `run`
    returns False if it was interrupted, and raises OSError if a child cannot be started."""

    def __init__(
        self,
        parallel: int,
        *,
        started: Callable[[Job], None],
        ended: Callable[[Job, int, float], None],
        interrupted: Callable[[int], None],
        environment: Mapping[str, str],
        keep_open: Sequence[int] = (),
    ) -> None:
        self._parallel = parallel
        self._started = started
        self._ended = ended
        self._interrupted = interrupted
        self._environment = environment
        self._keep_open = tuple(keep_open)
        self._running: set[asyncio.subprocess.Process] = set()
        self._signals = 0

    async def run(self, jobs: Sequence[Job]) -> bool:
        waiting = deque(jobs)
        with self._listening():
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._parallel):
                        workers.create_task(self._work(waiting))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return self._signals == 0

    async def _work(self, waiting: deque[Job]) -> None:
        while waiting and not self._signals:
            job = waiting.popleft()
            self._started(job)
            began = time.monotonic()
            code = await self._child(job)
            self._ended(job, code, time.monotonic() - began)

    async def _child(self, job: Job) -> int:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            # A session of its own: a terminal's Ctrl-C must not reach it besides ours, since a second SIGINT means at
            # once.
            child = await asyncio.create_subprocess_exec(
                *job.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self._environment),
                pass_fds=self._keep_open,
                start_new_session=True,
            )
        self._running.add(child)
        try:
            for _ in range(min(self._signals, 2)):  # that came while it was being started
                self._signal(child)
            return await child.wait()
        finally:
            self._running.discard(child)
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)

    def _signal(self, child: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._signals > 1:
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.send_signal(signal.SIGINT)

    def _interrupt(self) -> None:
        self._signals += 1
        self._interrupted(len(self._running))
        for child in self._running:
            self._signal(child)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
