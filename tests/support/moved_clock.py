"""An event loop on the real clock, which a test moves forward: a time-out of a minute expires at once.

A test with a real server needs real time, and its healthy calls need a time-out that no stall of a busy machine
reaches. The test moves the clock at the moment when the call that hangs has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from tests.support.loops import play


class MovedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is ahead of the real one."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def move(self, seconds: float) -> None:
        """Move the clock forward, from any thread, on the loop's next turn."""
        self.call_soon_threadsafe(self._move, seconds)

    def _move(self, seconds: float) -> None:
        self._ahead_s += seconds


def move_clock(seconds: float) -> None:
    """Move the clock of the running loop, which is a `MovedLoop`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MovedLoop)
    loop.move(seconds)


def run_moved(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine as `asyncio.run` does, on a clock that can be moved."""
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        return runner.run(work)


def on_a_moved_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test on a clock that it can move."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        play(test(*args, **kwargs), run_moved)

    return run
