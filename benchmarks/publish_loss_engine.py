"""Hosts the engine of the probe of publishes: kept full with requests, it handles new versions in one of three ways.

- swap: as in the framework; samples continue, and the new version computes their next step
- drain: nothing begins until all running samples are done; then the version is staged and swapped in
- abort: running samples are discarded, the version is staged and swapped in, and those samples restart
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from benchmarks.weights_roles import EngineHost
from omni_async.rollout.base import Trajectory
from omni_async.types import SampleRequest, WeightManifest, WeightReport

Way = Literal["swap", "drain", "abort"]
_POLL_S = 0.005


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the samples of one arm.

    - `aborted`, `failed`: attempts without a result.
    - `mixed`: samples whose steps were computed by more than one version.
    - `computed`: steps of single samples that the worker has computed.
    - `used`: steps of finished trajectories."""

    asked: int
    finished: int
    aborted: int
    failed: int
    mixed: int
    computed: int
    used: int

    @property
    def lost_samples(self) -> int:
        """Return the attempts without a trajectory."""
        return self.aborted + self.failed

    @property
    def lost_steps(self) -> int:
        return self.computed - self.used


class BusyHost(EngineHost):
    """An engine host that always has `rollout.max_inflight` samples in flight, as long as there are any."""

    _way: Way = "swap"
    _filling: asyncio.Task[None] | None = None

    async def begin(self, way: Way, requests: Sequence[SampleRequest]) -> None:
        """Begin to generate all samples; handle every version that `receive` brings meanwhile in this way."""
        self._way, self._waiting, self._num_asked = way, deque(requests), len(requests)
        self._open = asyncio.Event()
        self._open.set()
        self._running: set[asyncio.Task[Trajectory]] = set()
        self._made: list[Trajectory] = []
        self._aborted = self._failed = 0
        self._computed_before = await self._steps_computed()
        self._filling = asyncio.create_task(self._fill())

    async def outcome(self) -> Outcome:
        """Wait for the last sample, and count."""
        assert self._filling is not None
        await self._filling
        return Outcome(
            asked=self._num_asked,
            finished=len(self._made),
            aborted=self._aborted,
            failed=self._failed,
            mixed=sum(len(set(made.versions)) > 1 for made in self._made),
            computed=await self._steps_computed() - self._computed_before,
            used=sum(len(made.versions) for made in self._made),
        )

    @property
    def _busy(self) -> bool:
        return self._filling is not None and not self._filling.done()

    async def _fill(self) -> None:
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._config.rollout.max_inflight):
                slots.create_task(self._slot())

    async def _slot(self) -> None:
        """Generate one sample after the other. Restart a discarded sample, but not a failed one."""
        while True:
            await self._open.wait()
            if not self._waiting:
                return
            request = self._waiting.popleft()
            attempt = asyncio.create_task(self._engine.generate(request))
            self._running.add(attempt)
            await asyncio.wait({attempt})
            self._running.discard(attempt)
            if attempt.cancelled():
                self._aborted += 1
                self._waiting.appendleft(request)
            elif attempt.exception() is not None:
                self._failed += 1
            else:
                self._made.append(attempt.result())

    async def reach(self, steps: int) -> bool:
        """Wait until so many steps are computed. Return whether samples were in flight then."""
        while self._busy and await self._steps_computed() - self._computed_before < steps:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)  # only the worker knows
        return self._busy

    async def receive(self, transport: str, manifest: WeightManifest, parcel: Any) -> WeightReport:
        if self._way == "swap" or not self._busy:
            return await super().receive(transport, manifest, parcel)
        self._open.clear()
        try:
            if self._way == "abort":
                for attempt in self._running:
                    attempt.cancel()
            if self._running:
                await asyncio.wait(self._running)
            return await super().receive(transport, manifest, parcel)
        finally:
            self._open.set()

    async def _steps_computed(self) -> int:
        answer = await self._engine._call("steps_computed")  # type: ignore[attr-defined]
        return int(answer["steps"])
