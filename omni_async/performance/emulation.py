"""Emulates devices on the running event loop's clock: the duration of their jobs, one at a time, and random media.

`Device` waits only for that clock, with `asyncio.sleep`, so it also runs on a loop of virtual time. Emulated devices on
real clocks and simulated roles in virtual time both use `Draws`, so the same worker with the same seed takes the same
times in both.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import numpy.typing as npt

from omni_async.performance.profile import Profile

# Size of the seed; no emulated media is smaller.
SEED_BYTES = 8

MediaBytes = npt.NDArray[np.uint8]


class Device:
    """A device that runs one job at a time. Every job is planned from the planned end of the previous job.

    A late wake-up of the event loop delays only one job: the next job is planned as if it had been on time, so lag does
    not add up over a busy period."""

    def __init__(self) -> None:
        self._free: float | None = None  # the loop's time at which all planned work ends
        self._late = 0.0  # seconds between the last planned end and the moment the task woke up

    def now(self) -> float:
        """Return the loop's time, corrected for a late wake-up at the end of the last job."""
        return asyncio.get_running_loop().time() - self._late

    def begins(self, since: float | None = None) -> float:
        """Return the loop's time at which a job that could start at `since` starts, as for `busy`."""
        if since is None and self._free is None:
            return asyncio.get_running_loop().time()
        return max(t for t in (self._free, since) if t is not None)

    async def busy(self, seconds: float, since: float | None = None) -> None:
        """Wait until a job of `seconds` is done.

        The job could start at `since`, in the loop's time (None: as soon as the device is free). It starts then or when
        the device is free, whichever is later."""
        loop = asyncio.get_running_loop()
        self._free = self.begins(since) + seconds
        await asyncio.sleep(max(0.0, self._free - loop.time()))
        self._late = max(0.0, loop.time() - self._free)


class Draws:
    """The service times of one worker, from its own random stream.

    They do not depend on when other workers are busy."""

    def __init__(self, name: str, seed: int, profile: Profile) -> None:
        self.name = name
        stream = random.Random(f"{seed}/{name}")
        self._stages = {stage: service.sampler(stream) for stage, service in profile.stages().items()}

    def seconds(self, stage: str, units: float = 1) -> float:
        """Draw the seconds of one job of this stage of the profile; 0 for no units.

        `score/LABEL` is a scorer's own time, or the time of `score` if the profile does not contain it."""
        draw = self._stages.get(stage) or self._stages[stage.partition("/")[0]]
        return draw(units)


def random_bytes(size: int, seed: int) -> MediaBytes:
    """Return `size` bytes that are incompressible and read-only."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def with_seed(media: MediaBytes, seed: int) -> MediaBytes:
    """Return a copy of `media`, at least `SEED_BYTES` of it, that begins with `seed`."""
    marked = media.copy()
    marked[:SEED_BYTES] = np.frombuffer(seed.to_bytes(SEED_BYTES, "little"), np.uint8)
    return marked


def seed_of(media: MediaBytes) -> int:
    """Read the seed. Raises ValueError for media too short to carry one."""
    if media.nbytes < SEED_BYTES:
        raise ValueError(f"emulated media has at least {SEED_BYTES} bytes, got {media.nbytes}")
    return int.from_bytes(media.reshape(-1)[:SEED_BYTES].tobytes(), "little")
