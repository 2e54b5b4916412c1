"""Waiting without polling and without being forgotten."""

from __future__ import annotations

import asyncio


class Bell:
    """`await wait()` returns at the next `ring()`. Callers loop: check a condition, wait, check again. Between a check and its wait no other
    task runs, so no ring is missed; a cancelled waiter takes nothing with it, because every ring wakes everyone."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._waiters = [f for f in self._waiters if f is not future]

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    @property
    def waiting(self) -> int:
        return len(self._waiters)
