"""Simulates the network between roles: every call takes a random time there and back, may be delivered twice, and
outlives its caller.

Owns the messages under way. A call of a dead process hangs for ever; messages that it had sent before may still arrive.
Calls the world's `delivered` after each message that its target has dealt with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partialmethod
from typing import Any, NoReturn, cast

from omni_async.rollout.base import EngineError
from omni_async.simulation.virtual_time import VirtualTimeLoop

# Calls for work, by the call that hands in what they carry: its position among the arguments.
_CARRIES = {"next_samples": ("samples_done", 3), "next_to_score": ("scored", 2)}
# A second delivery, however late, must change nothing.
_ANY_TIME = {"samples_done", "scored", "engine_lost", "scorer_lost"}
# A second delivery right after the first must change nothing. Later there may be another lease of the same sample, or
# another version.
_AT_ONCE = {"sample_failed", "engine_holds"}

Call = Callable[..., Awaitable[Any]]


class Process:
    """A process, which dies at once, with its tasks and calls. A `hung` one does nothing any more, unreported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.hung = False
        self.doing: set[str] = set()  # for coverage
        self.tasks: list[asyncio.Task[Any]] = []
        self._hanging: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return self.name

    def start(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.append(task)
        if self.dead:
            task.cancel()
        return task

    def kill(self) -> None:
        self.dead = True
        for task in self.tasks:
            task.cancel()

    def forget(self) -> None:
        """Drops its tasks, which are done. References name the process that made their object, and messages that hold
        references are passed over by the garbage collector: the tasks of every schedule would stay."""
        self.tasks.clear()
        self._hanging.clear()

    async def pause(self, seconds: float) -> None:
        """Waits as long as a step of its work takes."""
        if self.hung or self.dead:
            await self.for_ever()
        if seconds:
            await sleep(seconds)
            if self.hung or self.dead:
                await self.for_ever()

    async def do(self, what: str, seconds: float) -> None:
        """Takes that long for something that it is seen doing."""
        self.doing.add(what)
        await self.pause(seconds)
        self.doing.discard(what)

    async def for_ever(self) -> NoReturn:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hanging.append(never)  # without a reference it is collected, with a warning
        await never
        raise AssertionError("never completed")


def sleep(seconds: float) -> asyncio.Future[None]:
    """Sleeps cheaper than asyncio's: ten thousand schedules are mostly this."""
    loop = cast(VirtualTimeLoop, asyncio.get_running_loop())
    return loop.sleep_until(loop.now + seconds)


class Network:
    """The network of a world; the attempt has `delivered` and `broken`."""

    def __init__(self, attempt: Any, world: Any) -> None:
        self._attempt, self._world, self._dice = attempt, world, world.dice
        self._under_way: set[asyncio.Task[None]] = set()

    async def call(self, caller: Process, name: str, target: Call, *args: Any) -> Any:
        if caller.dead or caller.hung:
            await caller.for_ever()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._send(self._carry(caller, name, answer, target, args), name)
        return await answer

    def _send(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"message {name}")
        self._under_way.add(task)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._attempt.broken(error)

    async def _carry(
        self, caller: Process, name: str, answer: asyncio.Future[Any], target: Call, args: tuple[Any, ...]
    ) -> None:
        await self._travel()
        if caller.dead:
            if self._dice.random() < self._world.temper.lost_with_caller:
                return
            self._world.seen["a message of the dead"] += 1
        try:
            work = target(*args)
            if name in _CARRIES and args[_CARRIES[name][1]]:
                work = asyncio.ensure_future(work)
                await self._hand_in(caller, name, work, target, args)
            result = await work
        except Exception as error:
            await self._travel()
            if not answer.done():
                answer.set_exception(error)
            elif not isinstance(error, EngineError):
                raise
            return
        self._attempt.delivered(caller, name, args, result)
        if self._dice.random() < self._world.temper.duplicated and (name in _ANY_TIME or name in _AT_ONCE):
            self._world.seen["a message twice"] += 1
            if name in _AT_ONCE:
                await target(*args)
            else:
                self._send(self._again(target, args), name)
        await self._travel()
        if not answer.done():
            answer.set_result(result)

    async def _hand_in(
        self, caller: Process, name: str, work: asyncio.Future[Any], target: Call, args: tuple[Any, ...]
    ) -> None:
        """Treats the results that a call for work carries as a message: its wait for work must not hold them back."""
        report, position = _CARRIES[name]
        results = args[position]
        await asyncio.sleep(0)
        if work.done() and work.exception() is not None:
            return
        self._attempt.delivered(caller, report, (args[0], results), None)
        if self._dice.random() < self._world.temper.duplicated:
            self._world.seen["a message twice"] += 1
            self._send(self._again(getattr(target.__self__, report), (args[0], results)), report)  # type: ignore[attr-defined]

    async def _again(self, target: Call, args: tuple[Any, ...]) -> None:
        await self._travel()
        await target(*args)

    async def _travel(self) -> None:
        if seconds := self._world.seconds_of("message"):
            await sleep(seconds)


class CoordinatorProxy:
    """The coordinator, as a process sees it: any of its calls, over the network."""

    def __init__(self, network: Network, caller: Process, coordinator: Any) -> None:
        self._network, self._caller, self._coordinator = network, caller, coordinator

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        target = getattr(self._coordinator, name)
        call = lambda *args: self._network.call(self._caller, name, target, *args)  # noqa: E731
        setattr(self, name, call)  # found without __getattr__ from now on
        return call


class ProducerProxy:
    """A producer, as the publisher sees it. Calls to a dead one fail, as a cluster reports dead actors."""

    def __init__(self, network: Network, caller: Process, callee: Process, producer: Any) -> None:
        self._network, self._caller, self._callee, self._producer = network, caller, callee, producer

    def __repr__(self) -> str:
        return self._callee.name

    async def _call(self, name: str, *args: Any) -> Any:
        return await self._network.call(self._caller, name, self._unless_dead, name, *args)

    join_weights = partialmethod(_call, "join_weights")
    receive_weights = partialmethod(_call, "receive_weights")

    async def _unless_dead(self, name: str, *args: Any) -> Any:
        if self._callee.dead:
            raise EngineError(f"{self._callee.name} is dead")
        task = self._callee.start(getattr(self._producer, name)(*args), name)
        try:
            return await task
        except asyncio.CancelledError:
            if self._callee.dead:
                raise EngineError(f"{self._callee.name} died") from None
            raise
