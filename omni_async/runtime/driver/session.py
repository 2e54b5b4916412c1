"""Runs one attempt on a started cluster, and turns Ctrl-C and SIGTERM into events that the attempt can wait for.

An attempt lasts from the first sample until every role has finished, or until a part is lost that the run cannot do
without.

Every ending (done, a failure of any role, Ctrl-C) uses the same path: the coordinator ends, the trainer writes a
checkpoint, the remaining events are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omni_async.aio.clock import Clock
from omni_async.aio.supervisor import Supervisor, TaskFailed
from omni_async.aio.waiting import first_of
from omni_async.config import Config
from omni_async.config.role_table import roles_of
from omni_async.records.write.rundir import RunDirectoryError
from omni_async.records.write.summary import Status
from omni_async.rewards.base import WrongScorer
from omni_async.runtime.cluster import Cluster, PeerLost
from omni_async.runtime.driver.callbacks import Callback, CallbackFailed, Callbacks
from omni_async.runtime.driver.control_socket import Request
from omni_async.runtime.driver.observer import Observer
from omni_async.runtime.keeper import Keeper, Restarts

# Time for the coordinator to handle the driver's last calls and to return its events, and for the last samples.
_LAST_EVENTS_S = 10.0
_SAMPLES_S = 30.0
_CALLBACKS_S = 60.0


@dataclass
class Ending:
    """How a run ended; the first cause is kept.

    `lost`: the loss that ended it, if the run can only continue from its last checkpoint without the lost part."""

    status: Status = "done"
    reason: str | None = None
    cause: BaseException | None = field(default=None, repr=False)
    lost: str | None = None

    def because(self, status: Status, reason: str, cause: BaseException | None = None) -> None:
        """Set how the run ended, unless that is set already.

        Args:
            status: any status except `done`.
            reason: why, for people.
            cause: the error that ended it, if any."""
        if self.status == "done":
            self.status, self.reason, self.cause = status, reason, cause


class Session:
    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        observer: Observer,
        restarts: Restarts,
        clock: Clock,
        callbacks: Sequence[Callback],
    ) -> None:
        self._closing_s = config.run.closing_timeout_s
        self._cluster = cluster
        self._observer = observer
        self._roles, self._services = Supervisor(), Supervisor()
        self._table = roles_of(config)
        self._keeper = Keeper(cluster, self._roles, restarts, clock, observer.tell, observer.fault, self._table)
        self._callbacks = Callbacks(callbacks)
        observer.on_line, observer.sampled = self._callbacks.put, cluster.sampled
        observer.on_lost, observer.on_closing = self._keeper.give_up, self._keeper.stop_replacing

    async def run(self, interrupted: asyncio.Event) -> Ending:
        ending, cluster, observer = Ending(), self._cluster, self._observer
        async with self._services as services, self._roles as roles:
            watching = services.start_task("driver", observer.watch(cluster.coordinator, cluster.store))
            services.start_task("interrupts", _stop_when(interrupted, cluster))
            services.start_task("callbacks", self._callbacks.run())
            for name, work in cluster.services().items():
                services.start_task(name, work)
            for name, work in cluster.work().items():
                roles.start_task(name, work)
            for name, work in cluster.workers().items():
                self._keeper.employ(name, work)
            failure: TaskFailed | None = None
            try:
                await first_of(services.wait(), roles.wait(), observer.closing.wait())
            except TaskFailed as error:
                failure, ending.lost = error, await self._lost_with(error)
            self._keeper.stop_replacing()
            if failure and ending.lost is not None:  # this attempt can only report what it has done
                await self._take_last_events(watching)
                ending.because("failed", ending.lost, failure)
            else:
                await self._wind_down(ending, failure, watching)
        return ending

    async def _wind_down(self, ending: Ending, failure: TaskFailed | None, watching: asyncio.Task[None]) -> None:
        """Close in order: all roles learn that the run is over, the trainer saves, the last events are recorded."""
        coordinator, observer = self._cluster.coordinator, self._observer
        if failure:
            with contextlib.suppress(Exception):  # the coordinator may be the failed part, or does not answer
                async with asyncio.timeout(_LAST_EVENTS_S):
                    await coordinator.fail(describe(failure))
        unfinished, ending.lost = await _settle(self._roles, self._closing_s)
        unrecorded = await self._take_last_events(watching)
        await observer.samples_written(_SAMPLES_S)
        if failure is None and self._callbacks.functions:
            failure = await self._last_callbacks()
        # The coordinator keeps the first failure that it learned of; later failures are consequences.
        ended = observer.ended or {"status": "failed", "reason": "the coordinator never said how the run ended"}
        if observer.ended and ended["status"] == "failed":
            ending.because("failed", ended["reason"] or "failed", failure)
        if failure:
            ending.because("failed", describe(failure), failure)
        if unfinished:
            ending.because("failed", unfinished)
        if unrecorded:
            ending.because("failed", describe(unrecorded), unrecorded)
        if ended["status"] != "done":
            ending.because(ended["status"], ended["reason"] or ended["status"])

    async def _take_last_events(self, watching: asyncio.Task[None]) -> RunDirectoryError | None:
        """Record the coordinator's remaining events; return the error if one could not be recorded, else None."""
        unrecorded: RunDirectoryError | None = None
        with contextlib.suppress(Exception):  # a coordinator that fails, or does not answer, has no more events
            async with asyncio.timeout(_LAST_EVENTS_S):
                await self._cluster.coordinator.conclude()
                await asyncio.wait({watching})
                error = None if watching.cancelled() else watching.exception()
                if isinstance(error, RunDirectoryError):  # the last events may have filled the disk
                    unrecorded = error
                if watching.cancelled() or error is not None:
                    await self._observer.count(self._cluster.coordinator)
        return unrecorded

    async def _last_callbacks(self) -> TaskFailed | None:
        """Wait for the callbacks of the last lines, for a while. Return the failure of a callback."""
        try:
            async with asyncio.timeout(_CALLBACKS_S):
                await first_of(self._services.wait(), self._callbacks.all_called())
        except TaskFailed as failed:
            return failed
        except TimeoutError:
            self._observer.tell(f"warning: a callback has not returned for {_CALLBACKS_S:g} s; the run ends without it")
        return None

    async def answer(self, request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        """Answer `omni-async status` and `scale`; `tell`: callback for progress lines.

        Raises ValueError, one line, if the request cannot be fulfilled."""
        for role, workers in request.scale.items():
            if not self._keeper.workers(role):
                scaled = [name for name, spec in self._table.items() if spec.scales and self._keeper.workers(name)]
                has = " and ".join(scaled) or "none that scale"
                raise ValueError(f"{role}: this run has no workers of that role; it has {has}")
            await self._keeper.scale(role, workers, tell)
        return {
            "progress": self._observer.progress(),
            "parts": self._cluster.parts(),
            "faults": len(self._observer.faults),
            "devices": msgspec.to_builtins(self._observer.devices()),
            **await self._cluster.coordinator.statistics(),
        }

    async def _lost_with(self, failure: TaskFailed) -> str | None:
        """Return which part was lost, if a loss caused the failure: other ranks may report a dead rank first."""
        if isinstance(failure.__cause__, PeerLost):
            return str(failure.__cause__)
        with contextlib.suppress(Exception):
            return await self._cluster.find_lost()
        return None


async def _settle(roles: Supervisor, seconds: float) -> tuple[str | None, str | None]:
    """Let the roles finish, because the run is over; the trainer ends its update and writes its checkpoint.

    Returns the problem, if any, and which part was lost, if a loss is the cause."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            await roles.settle()
            await roles.wait()
    except Exception as error:  # noqa: BLE001 (the run is over; how closing it went is reported too)
        if deadline.expired():
            return f"the roles were not done run.closing_timeout_s = {seconds:g} after the run was over", None
        return describe(error), str(error.__cause__) if isinstance(error.__cause__, PeerLost) else None
    return None, None


async def _stop_when(interrupted: asyncio.Event, cluster: Cluster) -> None:
    await interrupted.wait()
    await cluster.coordinator.stop("on request")
    await cluster.preempt()
    await asyncio.Event().wait()  # a service: it ends by being cancelled


def describe(error: BaseException) -> str:
    if isinstance(error, TaskFailed) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, PeerLost | RunDirectoryError | WrongScorer | CallbackFailed):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# ---- signals ---------------------------------------------------------------------------------------------------------

# A terminal that closes sends SIGHUP. Batch systems warn with SIGUSR1 or SIGUSR2 before the time is up.
_WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_WARNINGS)
# `timeout` and batch systems signal the process and then its group: a repetition this soon is the same signal.
_SAME_S = 0.3
_FIRST = (
    "ending in order: a checkpoint, then summary and timeline; Ctrl-C again leaves at once, without the checkpoint and"
    " the timeline"
)
_FIRST_AT_START = (
    "ending while {}, which is abandoned: no checkpoint is written; Ctrl-C again leaves at once, without waiting for"
    " that"
)
_SECOND = (
    "leaving at once: a checkpoint that is not written by now is given up, and there is no timeline; the summary is"
    " written"
)


class Interruption(asyncio.Event):
    """An event set when the run shall end in order; `at_once` is set when it shall leave without doing so.

    `tell` receives a line that explains the effect. `starting`: the step of a start that a stop abandons; None once
    there is something to save."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.at_once = asyncio.Event()
        self.starting: str | None = "starting"
        # A warning that was ignored when the process started, as SIGHUP is under nohup, stays ignored.
        self.heeded = [n for n in _SIGNALS if n not in _WARNINGS or signal.getsignal(n) is not signal.SIG_IGN]
        self._tell = tell
        self._first: float | None = None

    def signalled(self, number: int) -> None:
        """Handle a signal.

        A second Ctrl-C ends the run at once; Python handles a third. Machines send the other signals, followed by
        SIGKILL: a repeated one changes nothing."""
        if self._first is None:
            self.request()
        elif number == signal.SIGINT and time.monotonic() - self._first > _SAME_S:
            self.at_once.set()
            self.release_ctrl_c()
            self._tell(_SECOND)

    def request(self) -> None:
        """End the run in order, as the first signal does; a later request changes nothing."""
        if self._first is None:
            self._first = time.monotonic()
            self.set()
            self._tell(_FIRST if self.starting is None else _FIRST_AT_START.format(self.starting))

    def release_ctrl_c(self) -> None:
        """Return the handling of Ctrl-C to Python.

        From now on Ctrl-C interrupts the current work, for example the writing of the timeline. The other signals still
        end nothing: the second SIGTERM of `timeout` may come late."""
        _remove_handlers(signal.SIGINT)


@contextlib.asynccontextmanager
async def interrupts(tell: Callable[[str], None] = lambda text: None) -> AsyncIterator[Interruption]:
    """Yield the event that SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 set, as long as the context lasts."""
    event = Interruption(tell)
    listen(event)
    try:
        yield event
    finally:
        _remove_handlers(*event.heeded)


def listen(event: Interruption) -> None:
    """Install the signal handlers, again after Ray has started: Ray installs its own for SIGTERM, and dies of it.

    Does nothing once the run leaves at once."""
    if event.at_once.is_set():
        return
    for number in event.heeded:
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread, which alone gets signals
            asyncio.get_running_loop().add_signal_handler(number, event.signalled, number)


def _remove_handlers(*numbers: signal.Signals) -> None:
    for number in numbers:
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(number)
