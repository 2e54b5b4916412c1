"""Tests the host of a service: when its address is known, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_async.actors.service import ServiceEnded, ServiceHost, ServiceNotStarted
from omni_async.services import Service


class Desk:
    """The part of a coordinator that a service's host calls."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.over = asyncio.Event()

    async def service_ready(self, worker: str, address: str) -> None:
        self.addresses[worker] = address

    async def service_lost(self, worker: str) -> None:
        self.addresses.pop(worker, None)

    async def closing(self) -> None:
        await self.over.wait()


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


async def test_it_serves_until_the_run_is_over() -> None:
    desk, service = Desk(), Told()
    host = ServiceHost("judge-0", service, desk)  # type: ignore[arg-type]
    await host.start()
    assert desk.addresses == {"judge-0": "here:1"}
    running = asyncio.ensure_future(host.run())
    await asyncio.sleep(0)
    desk.over.set()
    await running
    await host.close()
    assert service.told == ["close"], "once"


async def test_one_that_ends_before_the_run_counts_as_lost() -> None:
    service = Told()
    host = ServiceHost("judge-0", service, Desk())  # type: ignore[arg-type]
    await host.start()
    service.ends.set()
    with pytest.raises(ServiceEnded, match="judge-0: its service ended before the run"):
        await host.run()
    assert service.told == ["close"]


@pytest.mark.virtual_time
async def test_one_that_is_lost_is_given_a_time_to_close_and_its_address_goes_first() -> None:
    desk = Desk()

    class Stuck(Told):
        async def close(self) -> None:
            self.told.append(f"close, {len(desk.addresses)} known")
            await asyncio.Event().wait()

    service = Stuck()
    host = ServiceHost("judge-0", service, desk)  # type: ignore[arg-type]
    await host.start()
    service.ends.set()
    before = asyncio.get_running_loop().time()
    with pytest.raises(ServiceEnded):
        await host.run()
    assert service.told == ["close, 0 known"] and asyncio.get_running_loop().time() - before == 10.0


async def test_one_that_leaves_finishes_what_it_has_while_its_address_is_told_to_nobody() -> None:
    desk, service = Desk(), Told()
    host = ServiceHost("judge-0", service, desk)  # type: ignore[arg-type]
    await host.start()
    running = asyncio.ensure_future(host.run())
    await asyncio.sleep(0)
    await host.leave()
    assert desk.addresses == {}
    await service.draining.wait()
    assert service.told == ["drain"] and not running.done()
    service.drained.set()
    await running
    assert service.told == ["drain", "close"]


@pytest.mark.parametrize(
    ("address", "said"), [(OSError("no port"), "judge-0 did not start: OSError: no port"), (8080, "a text, got int")]
)
async def test_one_that_does_not_start_is_closed_and_has_no_address(address: Any, said: str) -> None:
    desk, service = Desk(), Told(address)
    with pytest.raises((ServiceNotStarted, TypeError), match=said):
        await ServiceHost("judge-0", service, desk).start()  # type: ignore[arg-type]
    assert service.told == ["close"] and desk.addresses == {}
