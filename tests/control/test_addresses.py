"""Tests that addresses of services are waited for, forgotten when a worker is gone, and not waited for past the end."""

from __future__ import annotations

import asyncio

from omni_async.control.addresses import Addresses


def test_whoever_asks_before_a_worker_is_ready_gets_those_of_its_role_when_one_is() -> None:
    async def main() -> None:
        known = Addresses()
        asking = asyncio.ensure_future(known.of("judge"))
        known.ready("cache-0", "here:1")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asking.done(), "that is another role's"
        known.ready("judge-1", "here:2")
        assert await asking == {"judge-1": "here:2"}
        known.lost("judge-1")
        known.lost("judge-1")
        known.ready("judge-1.2", "here:3")
        assert await known.of("judge") == {"judge-1.2": "here:3"}

    asyncio.run(main())


def test_nobody_waits_once_the_run_is_over() -> None:
    async def main() -> None:
        known = Addresses()
        asking = asyncio.ensure_future(known.of("judge"))
        await asyncio.sleep(0)
        known.close()
        assert await asking == {} == await known.of("judge")

    asyncio.run(main())
