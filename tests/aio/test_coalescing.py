"""Items that come while a delivery is under way travel together in the next one, and every sender gets its own
answer."""

from __future__ import annotations

import asyncio
import random

import pytest

from omni_async.aio.waiting import Coalescer


class Carrier:
    """Deliveries that end when told to; an item's result is its double."""

    def __init__(self) -> None:
        self.deliveries: list[list[int]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def deliver(self, items: list[int]) -> list[int]:
        self.deliveries.append(items)
        await self.gate.wait()
        if self.error:
            raise self.error
        return [2 * item for item in items]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_comes_in_one_moment_or_during_a_delivery_travels_together() -> None:
    carrier = Carrier()
    post = Coalescer(carrier.deliver)
    first = [asyncio.create_task(post.send(item)) for item in (1, 2)]
    await turns()
    later = [asyncio.create_task(post.send(item)) for item in (3, 4, 5)]
    await turns()
    assert carrier.deliveries == [[1, 2]]
    carrier.gate.set()
    assert await asyncio.gather(*first, *later) == [2, 4, 6, 8, 10]
    assert carrier.deliveries == [[1, 2], [3, 4, 5]]
    assert await post.send(6) == 12
    assert carrier.deliveries[2:] == [[6]], "nothing is held back to fill a batch"


async def test_a_failed_delivery_fails_its_senders_and_no_others() -> None:
    carrier = Carrier()
    post = Coalescer(carrier.deliver)
    failing = [asyncio.create_task(post.send(item)) for item in (1, 2)]
    await turns()
    fine = asyncio.create_task(post.send(3))
    carrier.error = ConnectionError("the line is dead")
    carrier.gate.set()
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["the line is dead"] * 2
    assert isinstance((await asyncio.gather(fine, return_exceptions=True))[0], ConnectionError)
    carrier.error = None
    assert await post.send(4) == 8


async def test_a_delivery_that_answers_for_another_number_of_items_is_an_error() -> None:
    async def short(items: list[int]) -> list[int]:
        return items[1:]

    with pytest.raises(ValueError, match="shorter"):
        async with asyncio.timeout(1):
            await Coalescer(short).send(1)


async def test_a_cancelled_sender_withdraws_its_item_unless_it_has_left() -> None:
    carrier = Carrier()
    post = Coalescer(carrier.deliver)
    left = asyncio.create_task(post.send(1))
    await turns()
    withdrawn, kept = (asyncio.create_task(post.send(item)) for item in (2, 3))
    await turns()
    left.cancel()
    withdrawn.cancel()
    await turns()
    carrier.gate.set()
    assert await kept == 6
    assert carrier.deliveries == [[1], [3]]
    assert left.cancelled() and withdrawn.cancelled()


@pytest.mark.parametrize("seed", range(5))
async def test_everything_that_is_sent_is_delivered_once(seed: int) -> None:
    dice = random.Random(seed)
    delivered: list[int] = []

    async def deliver(items: list[int]) -> list[int]:
        delivered.extend(items)
        await turns(dice.randint(0, 3))
        return items

    post = Coalescer(deliver)

    async def send(item: int) -> int:
        await turns(dice.randint(0, 20))
        return await post.send(item)

    assert await asyncio.gather(*(send(item) for item in range(100))) == list(range(100))
    assert sorted(delivered) == list(range(100))
