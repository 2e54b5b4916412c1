"""Provides an asyncio event loop on virtual time: when nothing is ready it jumps to the next timer.

The loop owns the time of everything that runs on it: `loop.time()`, `asyncio.sleep`, `asyncio.timeout`, and
`VirtualClock` for code that takes a `Clock`.

Callbacks run in the order of their scheduling, timers of one instant too, so a run is reproducible. With `dice`,
callbacks that are ready together run in a random order drawn from it: equally reproducible, and it finds errors that
depend on the order.

The loop waits for nothing outside: a function for a thread is called at once and takes no virtual time, and there are
no sockets, signals or child processes. When every task is blocked and no timer is pending, `DeadlockError` lists the
waiting tasks and their lines. (A periodic task, or a task that yields for ever with `sleep(0)`, hides a deadlock; put a
virtual `asyncio.timeout` around such runs.)
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Timers no further apart fire together, as they do on a real clock of this resolution: sums of floats that should be
# equal may differ.
_RESOLUTION_S = 1e-9
_LISTED_TASKS = 20
_FEW_TIMERS = 100


class DeadlockError(RuntimeError):
    """A deadlock: every task waits for something that only another waiting task could do."""


class _NumberedTask(asyncio.Task[T]):
    """A task that is hashed by number instead of by address in memory, which differs from run to run.

    asyncio keeps tasks in sets, and cancels the tasks of a TaskGroup in the set's order."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """The event loop on virtual time.

    Time starts at `start` seconds; `dice` determines the order of callbacks that are ready together."""

    # BaseEventLoop keeps ready callbacks in a deque and runs one iteration per `_run_once`. The timers are kept here,
    # as tuples, because tuples compare much faster than its TimerHandles.
    _ready: Any
    _stopping: bool
    _check_closed: Callable[[], None]

    def __init__(self, start: float = 0.0, dice: random.Random | None = None) -> None:
        super().__init__()
        self.now = start
        self._dice = dice
        self._instant = start + _RESOLUTION_S  # timers up to this time are due now
        # (when, number, callback, arguments), or (when, number, TimerHandle, None)
        self._timers: list[tuple[float, int, Any, tuple[Any, ...] | None]] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._settling: list[Callable[[], object]] = []
        self._num_tasks = 0

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> asyncio.Task[Any]:
        self._check_closed()
        self._num_tasks += 1
        name = name or f"Task-{self._num_tasks}"
        return _NumberedTask(self._num_tasks, coro, loop=self, name=name, context=context)

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # else its cancellation is not counted
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer, None))
        return timer

    def call_when(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        """Call back at a time, like `call_at`, but cheaper.

        The call cannot be cancelled, and an exception of the callback ends the loop."""
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, callback, args))

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call back when nothing else is ready at this instant.

        For callers that react to all events of the instant, in whatever order. An exception of the callback ends the
        loop."""
        self._settling.append(callback)

    def sleep_until(self, when: float) -> asyncio.Future[None]:
        """Return a future that is done at that time, or now if it has passed. Cheaper than `asyncio.sleep`."""
        future: asyncio.Future[None] = self.create_future()
        self.call_when(when, _complete, future)
        return future

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call the function at once, in this thread: its result or exception is in the future."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 (the awaiter of the future handles it)
            future.set_exception(error)
        return future

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def _run_once(self) -> None:
        """Run until `stop`, which BaseEventLoop checks between calls of this method."""
        ready, timers, pop = self._ready, self._timers, heapq.heappop
        while True:
            if not ready and not self._stopping and not (timers and timers[0][0] <= self._instant):
                if self._settling:
                    callbacks, self._settling = self._settling, []
                    for callback in callbacks:
                        callback()
                else:
                    self._jump()
            while timers and timers[0][0] <= self._instant:
                _, _, timer, args = pop(timers)
                if args is not None:
                    timer(*args)
                else:
                    self._fire(timer)
            if self._dice is not None and len(ready) > 1:
                self._dice.shuffle(ready)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _jump(self) -> None:
        """Jump to the next timer."""
        timers = self._timers
        while timers and timers[0][3] is None and timers[0][2].cancelled():
            self._drop(heapq.heappop(timers)[2])
        if not timers:
            raise DeadlockError(_list_waiting(asyncio.all_tasks(self)))
        self.now = max(self.now, timers[0][0])
        self._instant = self.now + _RESOLUTION_S

    def _fire(self, timer: Any) -> None:
        if timer.cancelled():
            self._drop(timer)
        else:
            timer._scheduled = False
            self._ready.append(timer)

    def _drop(self, timer: Any) -> None:
        """Count a cancelled timer that was removed from the heap."""
        timer._scheduled = False
        self._num_cancelled -= 1

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """Count a cancelled timer; called by TimerHandle. Unused timeouts must not pile up."""
        if not timer._scheduled:  # type: ignore[attr-defined]
            return
        self._num_cancelled += 1
        if len(self._timers) > _FEW_TIMERS and 2 * self._num_cancelled > len(self._timers) + 2:
            # The timer being cancelled is marked only after this call.
            self._timers[:] = [entry for entry in self._timers if entry[3] is not None or not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 1

    def _write_to_self(self) -> None:
        """Do nothing: `call_soon_threadsafe` wakes a sleeping loop, but this loop never sleeps."""


class VirtualClock:
    """A `Clock` that returns the time of a loop (default: the running one)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()


def run(main: Coroutine[Any, Any, T], *, start: float = 0.0, dice: random.Random | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, in virtual time.

    Args:
        main: the coroutine.
        start: the time at which it begins, in seconds.
        dice: draws the order of callbacks that are ready together; None: the order of their scheduling.

    Raises:
        DeadlockError: nothing can continue.
        RuntimeError: another loop runs in this thread."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run() cannot be called from a running event loop")
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start, dice)) as runner:
        return runner.run(main)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _list_waiting(tasks: set[asyncio.Task[Any]]) -> str:
    waiting = sorted(
        (task for task in tasks if not task.done()), key=lambda task: (len(task.get_name()), task.get_name())
    )
    lines = [f"  {task.get_name()}: {_await_chain(task)}" for task in waiting[:_LISTED_TASKS]]
    if len(waiting) > _LISTED_TASKS:
        lines.append(f"  and {len(waiting) - _LISTED_TASKS} more")
    return "\n".join([f"all {len(waiting)} tasks wait and no timer is pending:", *lines])


def _await_chain(task: asyncio.Task[Any]) -> str:
    """Return the chain of coroutines of a task, outermost first, each with its file and line."""
    frames: list[str] = []
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(f"{coroutine.__qualname__} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        coroutine = coroutine.cr_await
    return " > ".join(frames)
