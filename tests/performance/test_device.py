"""Tests an emulated device in virtual time, and on a loop that is late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_async.performance.emulation import Device
from omni_async.simulation.virtual_time import VirtualTimeLoop, run


def test_jobs_follow_one_another_and_wait_for_what_they_need() -> None:
    async def main() -> list[float]:
        loop, device, ends = asyncio.get_running_loop(), Device(), []
        await device.busy(2.0)
        ends.append(loop.time())
        await device.busy(3.0)
        ends.append(loop.time())
        await asyncio.sleep(10.0)
        await device.busy(1.0, since=loop.time())  # idle until then
        ends.append(loop.time())
        await device.busy(1.0, since=4.0)  # it was there long ago, but the device was busy until 16
        ends.append(loop.time())
        return ends

    assert run(main()) == [2.0, 5.0, 16.0, 17.0]


def test_a_job_that_came_while_the_device_was_busy_is_planned_from_its_end() -> None:
    async def main() -> float:
        device = Device()
        await device.busy(2.0)
        await asyncio.sleep(1.5)  # the loop learns of the next job late, but it had come at 1
        await device.busy(4.0, since=1.0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 6.0


class LateLoop(VirtualTimeLoop):
    """An event loop on which every timer fires 30 ms late."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_later(delay + 0.03, callback, *args, context=context)


def test_a_loop_that_wakes_up_late_is_late_once_and_not_at_every_job() -> None:
    async def main() -> float:
        loop, device = asyncio.get_running_loop(), Device()
        for _ in range(10):
            await device.busy(0.1, since=device.now())
        return loop.time()

    with asyncio.Runner(loop_factory=LateLoop) as runner:
        assert runner.run(main()) == pytest.approx(1.03)
