"""Bell, event log, clocks and the signal test: the small parts everything waits on."""

from __future__ import annotations

import asyncio

import pytest

from omni_async.control.clock import ManualClock, WallClock
from omni_async.control.events import EventLog, Picture
from omni_async.control.waiting import Bell
from omni_async.types import Prompt, Score


def test_a_ring_wakes_everyone_who_waits_and_nobody_later() -> None:
    async def main() -> None:
        bell = Bell()
        bell.ring()
        waiters = [asyncio.create_task(bell.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert bell.waiting == 3
        bell.ring()
        assert bell.waiting == 0
        await asyncio.gather(*waiters)
        late = asyncio.create_task(bell.wait())
        await asyncio.sleep(0)
        assert not late.done()
        late.cancel()

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    async def main() -> None:
        bell = Bell()
        first, second = (asyncio.create_task(bell.wait()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bell.waiting == 1
        bell.ring()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert bell.waiting == 0

    asyncio.run(main())


def test_many_waiters_see_every_condition_change() -> None:
    """Check, wait, check again: ten consumers of one counter take each item once."""

    async def main() -> None:
        bell = Bell()
        items: list[int] = []
        taken: list[int] = []

        async def consume() -> None:
            while True:
                while not items:
                    await bell.wait()
                taken.append(items.pop())

        consumers = [asyncio.create_task(consume()) for _ in range(10)]
        for number in range(100):
            items.append(number)
            bell.ring()
            if number % 7 == 0:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(taken) == list(range(100))
        for consumer in consumers:
            consumer.cancel()

    asyncio.run(main())


def test_events_arrive_in_order_and_a_cancelled_reader_loses_none() -> None:
    async def main() -> None:
        log = EventLog()
        reader = asyncio.create_task(log.take())
        await asyncio.sleep(0)
        log.add("phase", {"text": "one"})
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        log.add("phase", {"text": "two"}, (Picture("media", Prompt(0, "two"), Score(1.0)),))
        events = await log.take()
        assert [e.data["text"] for e in events] == ["one", "two"]
        assert events[1].pictures == (Picture("media", Prompt(0, "two"), Score(1.0)),)
        waiting = asyncio.create_task(log.take())
        await asyncio.sleep(0)
        assert not waiting.done(), "never an empty answer"
        log.add("ended", {})
        assert [e.kind for e in await waiting] == ["ended"]

    asyncio.run(main())


def test_a_manual_clock_moves_forward_when_told() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="time only moves forward, got -1"):
        clock.advance(-1)
    assert WallClock().now() > 1.6e9
