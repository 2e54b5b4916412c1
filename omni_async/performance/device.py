"""Emulates a device: the time of one job at a time, planned on the running event loop's clock.

Waits for nothing but that clock, with `asyncio.sleep` alone, so it runs on a loop of virtual time as well. Every job is
planned from the end planned for the one before it. An event loop that wakes up late is late once: the next job is
planned as if it had not been, so lag does not add up over a busy period.
"""

from __future__ import annotations

import asyncio


class Device:
    def __init__(self) -> None:
        self._free: float | None = None  # the loop's time at which all planned work ends
        self._late = 0.0  # seconds between the end planned last and the moment the task woke up

    def now(self) -> float:
        """Return the loop's time, as it would be had the task woken up in time at the end of the last job."""
        return asyncio.get_running_loop().time() - self._late

    async def busy(self, seconds: float, since: float | None = None) -> None:
        """Wait until a job of `seconds` is done.

        The job could start at `since`, in the loop's time (None: as soon as the device is free), and starts then or
        when the device is free, whichever is later."""
        loop = asyncio.get_running_loop()
        start = (
            loop.time()
            if since is None and self._free is None
            else max(t for t in (self._free, since) if t is not None)
        )
        self._free = start + seconds
        await asyncio.sleep(max(0.0, self._free - loop.time()))
        self._late = max(0.0, loop.time() - self._free)
