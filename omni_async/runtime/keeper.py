"""Replaces workers that fail, hang or are killed during the run, and changes their number.

Only workers of roles that allow replacement are replaced: engines, reward workers and services.

The unfinished work of a lost worker is leased to other workers, with the same seeds. Its replacement has a new name, so
late messages of the old worker are not attributed to the new one. It gets no work before it holds the current weights.
Replacements are bounded: too many in one slot within an hour end the run.

| waits for      | unblocked by                                                                              |
|----------------|-------------------------------------------------------------------------------------------|
| a worker's end | its process, its health check, or the publisher that gave it up                           |
| a pause        | time: the second replacement in a slot within a minute waits, later ones longer each time |
| a replacement  | its start; or the end of the run, after which no worker is replaced                       |
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omni_async.aio.clock import Clock
from omni_async.aio.supervisor import Supervisor
from omni_async.aio.waiting import Event, Stopped, is_cancelled, unless
from omni_async.config.role_table import RoleSpec
from omni_async.records.write.attempts import Fault
from omni_async.runtime.cluster import Cluster, PeerLost, Work
from omni_async.worker import Worker

_WINDOW_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Consecutive replacements that may fail to start, for example for lack of room.
_MOST_STARTS = 5


class GaveUp(RuntimeError):
    """Raised when a part was lost too often, or cannot be started."""


class Restarts:
    """A count of the replacements in every slot.

    At most `most` replacements an hour are allowed, with pauses that double while losses follow each other closely."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._when: defaultdict[str, deque[float]] = defaultdict(deque)

    def pause(self, slot: str, reason: str) -> float:
        """Count a replacement and return the seconds to wait before it. Raises GaveUp if there were too many."""
        now, when = self._clock.now(), self._when[slot]
        while when and when[0] < now - _WINDOW_S:
            when.popleft()
        if len(when) >= self._most:
            times = f"{self._most} times within the hour, as often as run.restarts allows"
            often = f" after it had been replaced {times}" if self._most else " and run.restarts is 0"
            raise GaveUp(f"{slot} was lost ({reason}){often}")
        recent = sum(then > now - _LONGEST_PAUSE_S for then in when)
        when.append(now)
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (recent - 1)) if recent else 0.0


@dataclass(eq=False)
class Keeper:
    """The workers of a run, each replaced in its slot when it is lost.

    `tell` receives console lines about events, `record` every repaired fault. `table`: the rows of the workers' roles.
    """

    cluster: Cluster
    supervisor: Supervisor
    restarts: Restarts
    clock: Clock
    tell: Callable[[str], None]
    record: Callable[[Fault], None]
    table: Mapping[str, RoleSpec]

    def __post_init__(self) -> None:
        self._workers: dict[str, str] = {}  # slot id -> name of its worker
        self._started: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._given_up: dict[str, str] = {}  # name -> reason, see give_up
        self._at_work: set[str] = set()  # names of workers at work, neither lost nor being started
        self._closing = False
        self._scaling = asyncio.Lock()
        self._event = Event()

    def employ(self, name: str, work: Work) -> None:
        """Register a worker that has joined, and keep its slot filled."""
        slot = Worker.parse(name).slot
        self._workers[slot] = name
        self._started[slot] = max(1, self._started[slot])
        self.supervisor.start_task(slot, self._keep(name, work))

    def give_up(self, name: str, reason: str) -> None:
        """Mark a worker that does not do its part, so that it is replaced."""
        self._given_up[name] = reason
        self._event.notify()

    def stop_replacing(self) -> None:
        """Mark the run as closing: workers that end are not replaced."""
        self._closing = True
        self._event.notify()

    # ---- number of workers -------------------------------------------------------------------------------------------

    def workers(self, role: str) -> list[str]:
        """Return the role's workers that are at work or being replaced, one per slot."""
        mine = (name for slot, name in self._workers.items() if Worker.parse(slot).role == role)
        return [name for name in mine if name not in self._leaving]

    async def scale(self, role: str, count: int, tell: Callable[[str], None] = lambda text: None) -> None:
        """Start or drain workers until the role has `count`; surplus workers may still finish their current work.

        Args:
            role: a role of the table that scales.
            count: the number of workers that the role shall have.
            tell: receives a line about every worker that is started or drained, and about a wait for an earlier call.

        Raises:
            ValueError: the run is ending.
            Exception: any exception of a worker's start."""
        if self._scaling.locked():
            tell(f"{role}: waiting for a change of workers that was asked for before")
        async with self._scaling:
            await self._scale(role, count, tell)

    async def _scale(self, role: str, count: int, tell: Callable[[str], None]) -> None:
        workers = self.workers(role)
        if len(workers) == count:
            tell(f"{role}: there are {count} already")
        for name in reversed(workers[count:]):
            tell(f"{name}: gets no more work, and leaves when it has finished what it has")
            self._leaving.add(name)
            if name in self._at_work:
                await self.cluster.drain_worker(name)
        for _ in range(count - len(workers)):
            if self._is_closing():
                raise ValueError("the run is ending")
            slot = next(slot for i in itertools.count() if (slot := Worker(role, i).slot) not in self._workers)
            name = self._name(slot)
            self._workers[slot] = name
            self._started[slot] += 1
            tell(f"{name}: {self.table[role].loading}")
            try:
                work = await self.cluster.start_worker(name)
            except BaseException as error:
                del self._workers[slot]
                if self._is_closing() and isinstance(error, Exception):  # it did not start because the run ends
                    raise ValueError("the run is ending") from None
                raise
            if self._is_closing():  # the run began to close during the start, and adds no worker any more
                work.close()
                await self.cluster.remove_worker(name, "the run is ending")
                raise ValueError("the run is ending")
            self.employ(name, work)
            tell(f"{name}: at work")

    def _is_closing(self) -> bool:
        return self._closing

    def _name(self, slot: str) -> str:
        return str(Worker.parse(slot).numbered(self._started[slot] + 1))

    # ---- one slot ----------------------------------------------------------------------------------------------------

    async def _keep(self, name: str, work: Work) -> None:
        """Keep a slot filled until the run is over or the worker may leave. Raises GaveUp."""
        slot = Worker.parse(name).slot
        while (reason := await self._until_lost(name, work)) is not None:
            found = self.clock.now()
            try:
                replaced = await unless(self._when(lambda: self._closing), self._replaced(slot, name, reason))
            except Stopped:
                return
            if replaced is None:
                del self._workers[slot]
                return
            lost, (name, work) = name, replaced
            fault = Fault(found, lost, reason, name, self.clock.now() - found)
            self.tell(f"{name} is at work in place of {lost}, {fault.seconds:.1f} s after that was lost")
            try:
                self.record(fault)
            except BaseException:
                work.close()  # it will not be awaited
                raise
        if name in self._leaving:
            await self.cluster.remove_worker(name, "it was not needed any more")
            self._workers.pop(slot, None)

    async def _until_lost(self, name: str, work: Work) -> str | None:
        """Wait until the worker is lost and return the reason; None if its work is done or it needs no replacement."""
        self._at_work.add(name)
        try:
            await unless(self._when(lambda: name in self._given_up), work)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 (a worker can fail in any way)
            return _one_line(error) if self._is_wanted(name) else None
        finally:
            self._at_work.discard(name)
        # The coordinator may have ended it: because the run is over, which all roles learn, or because it was given up.
        await self._when(lambda: name in self._given_up or not self._is_wanted(name))
        return self._given_up[name] if self._is_wanted(name) else None

    def _is_wanted(self, name: str) -> bool:
        return not (self._closing or name in self._leaving)

    async def _when(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()

    async def _replaced(self, slot: str, name: str, reason: str) -> tuple[str, Work] | None:
        """Start a replacement and return its name and work; None if the slot needs no worker any more."""
        await self.cluster.remove_worker(name, reason)
        lost = slot if name == slot else f"{name} in slot {slot}"
        for tries in itertools.count(1):
            if name in self._leaving:
                return None
            if tries > _MOST_STARTS:
                raise GaveUp(f"{slot} cannot be replaced, {reason}")
            pause = self.restarts.pause(slot, reason)
            name = self._name(slot)
            self.tell(f"{lost} was lost ({reason}); starting {name}" + (f" in {pause:g} s" if pause else ""))
            await asyncio.sleep(pause)
            if self._workers[slot] in self._leaving:
                return None
            self._workers[slot] = name
            self._started[slot] += 1
            try:
                work = await self.cluster.start_worker(name)
                if name in self._leaving:
                    await self.cluster.drain_worker(name)
                return name, work
            except Exception as error:
                if is_cancelled():
                    raise  # a cancelled start may raise any exception
                reason = f"its replacement did not start: {_one_line(error)}"
        raise AssertionError("unreachable")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, PeerLost):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
