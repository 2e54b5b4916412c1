"""Brings back what dies: an engine or a reward worker that fails, hangs or is killed is replaced while the run goes on,
and their number may change.

What a lost one had under way is leased to others, with the same seeds. What replaces it has a name of its own, so
nothing that the old one still says is taken for the new one's, and it gets no work before it holds the current weights.
Replacements are bounded: too many of one place within an hour end the run.

| waits for      | unblocked by                                                                               |
|----------------|--------------------------------------------------------------------------------------------|
| a worker's end | its process, its health check, or the publisher that gave it up                            |
| a pause        | time: the second replacement of a place within a minute waits, and so on, longer each time |
| a replacement  | its start; or the end of the run, after which nobody is missed                             |
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol

from omni_async.control.clock import Clock
from omni_async.control.supervisor import Supervisor
from omni_async.control.waiting import Event, Stopped, is_cancelled, unless
from omni_async.runtime.cluster import PeerLost
from omni_async.tracking.faults import Fault

_WINDOW_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Replacements in a row that do not start: there is no room, or they can't.
_MOST_STARTS = 5

Work = Coroutine[Any, Any, Any]


class GaveUp(RuntimeError):
    """A part was lost too often, or cannot be had."""


class Workforce(Protocol):
    """A cluster whose engines and reward workers come and go."""

    async def remove_worker(self, name: str, reason: str) -> None:
        """Free what is left of it, and tell everybody who counts on it."""

    async def start_worker(self, name: str) -> Work:
        """Start the worker of that name; what it does until the run is over. It has joined when this returns."""

    async def drain_worker(self, name: str) -> None:
        """It shall finish what it has, and go."""


def place_of(name: str) -> str:
    """`rollout-0.2` is the second worker in the place `rollout-0`."""
    return name.partition(".")[0]


class Restarts:
    """How often a place has been filled again: at most `most` times an hour, with pauses that double while the losses
    follow each other closely."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._when: defaultdict[str, deque[float]] = defaultdict(deque)

    def pause(self, place: str, reason: str) -> float:
        """Seconds to wait before the next one. Raises GaveUp."""
        now, when = self._clock.now(), self._when[place]
        while when and when[0] < now - _WINDOW_S:
            when.popleft()
        if len(when) >= self._most:
            times = f"{self._most} times within the hour, as often as run.restarts allows"
            raise GaveUp(
                f"{place} was lost ({reason})"
                + (f" after it had been replaced {times}" if self._most else " and run.restarts is 0")
            )
        recent = sum(then > now - _LONGEST_PAUSE_S for then in when)
        when.append(now)
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (recent - 1)) if recent else 0.0


class Keeper:
    """`tell` gets a line for the console about what happens, `record` every fault that was mended."""

    def __init__(
        self,
        workforce: Workforce,
        supervisor: Supervisor,
        restarts: Restarts,
        clock: Clock,
        tell: Callable[[str], None],
        record: Callable[[Fault], None],
    ) -> None:
        self._workforce = workforce
        self._supervisor = supervisor
        self._restarts = restarts
        self._clock = clock
        self._tell = tell
        self._record = record
        self._present: dict[str, str] = {}  # place -> the worker in it
        self._started: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._given_up: dict[str, str] = {}  # by somebody else: name -> reason
        self._attended: set[str] = set()  # those at work, as opposed to lost or being started
        self._closing = False
        self._scaling = asyncio.Lock()
        self._event = Event()

    def employ(self, name: str, work: Work) -> None:
        """A worker that has joined: keep its place filled."""
        place = place_of(name)
        self._present[place] = name
        self._started[place] = max(1, self._started[place])
        self._supervisor.start(place, self._keep(name, work))

    def give_up(self, name: str, reason: str) -> None:
        """Somebody found that it does not do its part."""
        self._given_up[name] = reason
        self._event.notify()

    def close(self) -> None:
        """The run is closing: who goes is not missed."""
        self._closing = True
        self._event.notify()

    # ---- how many there are ------------------------------------------------------------------------------------------

    def workers(self, role: str) -> list[str]:
        """Those at work or being replaced, by place."""
        return [
            name
            for place, name in self._present.items()
            if place.rpartition("-")[0] == role and name not in self._leaving
        ]

    async def scale(self, role: str, count: int, tell: Callable[[str], None] = lambda text: None) -> None:
        """Until there are `count` workers of the role, or those that are too many know. `tell` gets a line about every
        one that comes or goes. Raises what a start raises, or ValueError."""
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
            if name in self._attended:
                await self._workforce.drain_worker(name)
        for _ in range(count - len(workers)):
            if self._is_closing():
                raise ValueError("the run is ending")
            place = next(f"{role}-{i}" for i in range(10**6) if f"{role}-{i}" not in self._present)
            name = self._name(place)
            self._present[place] = name
            self._started[place] += 1
            loads = (
                "loading its model; it gets work once it holds the newest weights"
                if role == "rollout"
                else "loading its scorers"
            )
            tell(f"{name}: {loads}")
            try:
                work = await self._workforce.start_worker(name)
            except BaseException as error:
                del self._present[place]
                if self._is_closing() and isinstance(error, Exception):  # the end is why it did not come
                    raise ValueError("the run is ending") from None
                raise
            if self._is_closing():  # by now, and nobody employs any more
                work.close()
                await self._workforce.remove_worker(name, "the run is ending")
                raise ValueError("the run is ending")
            self.employ(name, work)
            tell(f"{name}: at work")

    def _is_closing(self) -> bool:
        return self._closing

    def _name(self, place: str) -> str:
        return f"{place}.{self._started[place] + 1}" if self._started[place] else place

    # ---- one place ---------------------------------------------------------------------------------------------------

    async def _keep(self, name: str, work: Work) -> None:
        """Until the run is over or the worker may leave. Raises GaveUp."""
        place = place_of(name)
        while (reason := await self._until_lost(name, work)) is not None:
            found = self._clock.now()
            try:
                replaced = await unless(self._when(lambda: self._closing), self._replaced(place, name, reason))
            except Stopped:
                return
            if replaced is None:
                del self._present[place]
                return
            lost, (name, work) = name, replaced
            fault = Fault(found, lost, reason, name, self._clock.now() - found)
            self._tell(f"{name} is at work in place of {lost}, {fault.seconds:.1f} s after that was lost")
            try:
                self._record(fault)
            except BaseException:
                work.close()  # nobody will attend to it
                raise
        if name in self._leaving:
            await self._workforce.remove_worker(name, "it was not needed any more")
            self._present.pop(place, None)

    async def _until_lost(self, name: str, work: Work) -> str | None:
        """Why it is lost; None when it has done its work, or is not missed."""
        self._attended.add(name)
        try:
            await unless(self._when(lambda: name in self._given_up), work)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 (death comes in many kinds)
            return _one_line(error) if self._is_missed(name) else None
        finally:
            self._attended.discard(name)
        # It may have been sent home: because the run is over, as everybody will hear, or because it was given up.
        await self._when(lambda: name in self._given_up or not self._is_missed(name))
        return self._given_up[name] if self._is_missed(name) else None

    def _is_missed(self, name: str) -> bool:
        return not (self._closing or name in self._leaving)

    async def _when(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()

    async def _replaced(self, place: str, name: str, reason: str) -> tuple[str, Work] | None:
        """None: by now nobody is wanted there."""
        await self._workforce.remove_worker(name, reason)
        for tries in count(1):
            if name in self._leaving:
                return None
            if tries > _MOST_STARTS:
                raise GaveUp(f"{place} cannot be replaced, {reason}")
            pause = self._restarts.pause(place, reason)
            name = self._name(place)
            self._tell(f"{place} was lost ({reason}); starting {name}" + (f" in {pause:g} s" if pause else ""))
            await asyncio.sleep(pause)
            if self._present[place] in self._leaving:
                return None
            self._present[place] = name
            self._started[place] += 1
            try:
                work = await self._workforce.start_worker(name)
                if name in self._leaving:
                    await self._workforce.drain_worker(name)
                return name, work
            except Exception as error:
                if is_cancelled():
                    raise  # whatever a start says when it is broken off
                reason = f"its replacement did not start: {_one_line(error)}"
        raise AssertionError("unreachable")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, PeerLost):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
