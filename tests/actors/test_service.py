"""Tests the host of a service: when its address is known, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from actor_world import Desk

from omni_async.runtime.builders import ServiceEnded, ServiceHost, ServiceNotStarted
from omni_async.services import Service


class Told(Service):
    """A service that remembers what it was told, and may be made to end or to hold on while it drains."""

    def __init__(self, address: Any = "here:1") -> None:
        self.address = address
        self.told: list[str] = []
        self.ends = asyncio.Event()
        self.draining, self.drained = asyncio.Event(), asyncio.Event()

    async def start(self) -> str:
        if isinstance(self.address, Exception):
            raise self.address
        return self.address

    async def run(self) -> None:
        await self.ends.wait()

    async def drain(self) -> None:
        self.told.append("drain")
        self.draining.set()
        await self.drained.wait()

    async def close(self) -> None:
        self.told.append("close")
        raise RuntimeError("and closing fails, too")


@asynccontextmanager
async def serving(desk: Desk, service: Service) -> AsyncIterator[tuple[ServiceHost, asyncio.Future[None]]]:
    host = ServiceHost("judge-0", service, desk)
    await host.start()
    assert desk.addresses == {"judge-0": "here:1"}
    running = asyncio.ensure_future(host.run())
    await asyncio.sleep(0)
    yield host, running
    await running


async def test_it_serves_until_the_run_is_over() -> None:
    desk, service = Desk(), Told()
    async with serving(desk, service) as (host, _):
        desk.close()
    await host.close()
    assert service.told == ["close"], "once"


@pytest.mark.virtual_time
async def test_one_that_ends_before_the_run_is_lost_has_a_time_to_close_and_its_address_goes_first() -> None:
    desk = Desk()

    class Stuck(Told):
        async def close(self) -> None:
            self.told.append(f"close, {len(desk.addresses)} known")
            await asyncio.Event().wait()

    service, before = Stuck(), asyncio.get_running_loop().time()
    with pytest.raises(ServiceEnded, match="judge-0: its service ended before the run"):
        async with serving(desk, service):
            service.ends.set()
    assert service.told == ["close, 0 known"] and asyncio.get_running_loop().time() - before == 10.0


async def test_one_that_leaves_finishes_what_it_has_while_its_address_is_told_to_nobody() -> None:
    desk, service = Desk(), Told()
    async with serving(desk, service) as (host, running):
        await host.leave()
        assert desk.addresses == {}
        await service.draining.wait()
        assert service.told == ["drain"] and not running.done()
        service.drained.set()
    assert service.told == ["drain", "close"]


@pytest.mark.parametrize(
    ("address", "said"), [(OSError("no port"), "judge-0 did not start: OSError: no port"), (8080, "a text, got int")]
)
async def test_one_that_does_not_start_is_closed_and_has_no_address(address: Any, said: str) -> None:
    desk, service = Desk(), Told(address)
    with pytest.raises((ServiceNotStarted, TypeError), match=said):
        await ServiceHost("judge-0", service, desk).start()
    assert service.told == ["close"] and desk.addresses == {}
