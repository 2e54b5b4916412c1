"""Tests that addresses of services are waited for, forgotten when a worker is gone, and not waited for past the end."""

from __future__ import annotations

import asyncio

import pytest
from control_world import make_config, make_coordinator, now
from msgspec.structs import replace

from omni_async.config.schema import Role
from omni_async.control.coordinator import Coordinator


@pytest.fixture
def coordinator() -> Coordinator:
    config = replace(make_config(), roles=(Role(name="judge"), Role(name="cache")))
    return make_coordinator(config)[0]


async def test_whoever_asks_before_a_worker_is_ready_gets_those_of_its_role_when_one_is(
    coordinator: Coordinator,
) -> None:
    asking = asyncio.ensure_future(coordinator.addresses("judge"))
    await coordinator.service_ready("cache-0", "here:1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asking.done(), "that is another role's"
    await coordinator.service_ready("judge-1", "here:2")
    assert await asking == {"judge-1": "here:2"}
    await coordinator.service_lost("judge-1")
    await coordinator.service_lost("judge-1")
    await coordinator.service_ready("judge-1.2", "")
    assert await coordinator.addresses("judge") == {"judge-1.2": ""}
    told = [event.data["text"] for event in await coordinator.events()]
    assert told == ["cache-0: ready at here:1", "judge-1: ready at here:2", "judge-1.2: ready"]
    assert now(coordinator.statistics())["addresses"] == {"cache-0": "here:1", "judge-1.2": ""}
    with pytest.raises(ValueError, match=r"one of \['judge', 'cache'\], got 'jugde'"):
        await coordinator.addresses("jugde")


async def test_nobody_waits_once_the_run_is_over(coordinator: Coordinator) -> None:
    asking = asyncio.ensure_future(coordinator.addresses("judge"))
    await asyncio.sleep(0)
    await coordinator.stop("by its user")
    assert await asking == {} == await coordinator.addresses("judge")
