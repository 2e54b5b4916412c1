"""Tests event, queue and deliveries: the small parts everything waits on."""

from __future__ import annotations

import asyncio
import random

import pytest

from omni_async.aio.waiting import Coalescer, Event, FairQueue, all_of, unless
from tests.support.patience import PATIENCE


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_ring_wakes_everyone_who_waits_and_nobody_later() -> None:
    event = Event()
    event.notify()
    waiters = [asyncio.create_task(event.wait()) for _ in range(3)]
    await turns(1)
    assert event.waiting == 3
    event.notify()
    assert event.waiting == 0
    await asyncio.gather(*waiters)
    late, other = (asyncio.create_task(event.wait()) for _ in range(2))
    await turns(1)
    late.cancel()
    await turns(2)
    assert event.waiting == 1 and not other.done()
    event.notify()
    other.cancel()
    await asyncio.gather(late, other, return_exceptions=True)
    assert event.waiting == 0


class Counterful:
    """A counter of items with a queue before it; it records who took what, and how often anybody looked."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.taken: list[tuple[str, int]] = []
        self.looks = 0
        self.queue = FairQueue(self.is_open)

    def is_open(self) -> bool:
        self.looks += 1
        return bool(self.items)

    def put(self, *items: int) -> None:
        self.items += items
        self.queue.notify()

    async def take(self, who: str) -> int:
        def first() -> int:
            self.taken.append((who, self.items[0]))
            return self.items.pop(0)

        return await self.queue.take(first)


async def test_a_queue_is_served_in_the_order_it_formed_and_a_newcomer_does_not_overtake() -> None:
    counter = Counterful()
    waiting = [asyncio.create_task(counter.take(name)) for name in "abc"]
    await turns(1)
    counter.put(1, 2)
    newcomer = asyncio.create_task(counter.take("d"))  # the items are there, but a and b were first
    await turns(4)
    assert counter.taken == [("a", 1), ("b", 2)]
    counter.put(3, 4)
    await asyncio.gather(*waiting, newcomer)
    assert counter.taken[2:] == [("c", 3), ("d", 4)]
    assert counter.queue.waiting == 0


async def test_an_event_wakes_as_many_as_there_is_work_for_however_many_wait() -> None:
    counter = Counterful()
    waiting = [asyncio.create_task(counter.take(str(i))) for i in range(1000)]
    await turns(2)
    counter.looks = 0
    counter.put(1, 2, 3)
    await turns(10)
    assert [item for _, item in counter.taken] == [1, 2, 3]
    assert counter.looks <= 10, "not one look of each of a thousand waiters"
    counter.looks = 0
    for _ in range(50):
        counter.queue.notify()  # nothing is there
    await turns(5)
    assert counter.looks == 50
    assert counter.queue.waiting == 997
    for waiter in waiting:
        waiter.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert counter.queue.waiting == 0


async def test_an_evicted_caller_waits_no_longer_and_the_others_keep_their_positions() -> None:
    opened, served = False, []
    queue = FairQueue(lambda: opened)
    waiting = [asyncio.create_task(queue.take(lambda who=who: served.append(who), who)) for who in ("a", "b", "c")]
    await asyncio.sleep(0)
    queue.evict("b")
    await waiting[1]
    assert served == ["b"] and queue.waiting == 2
    await queue.take(lambda: served.append("b again"), "b")
    opened = True
    queue.notify()
    await asyncio.gather(*waiting)
    assert served == ["b", "b again", "a", "c"]


async def test_work_that_is_cancelled_from_within_is_not_a_cancellation_of_whoever_waits() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await unless(asyncio.Event().wait(), cancels_itself())


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_lost_among_many_waiters_cancelled_at_random_moments(seed: int) -> None:
    dice = random.Random(seed)
    counter = Counterful()
    waiting: dict[str, asyncio.Task[int]] = {}
    got: list[int] = []
    put = 0
    for _ in range(3000):
        move = dice.random()
        if move < 0.45:
            name = f"engine-{dice.randrange(60)}"
            if name not in waiting:
                waiting[name] = asyncio.create_task(counter.take(name))
        elif move < 0.75:
            count = dice.choice([1, 1, 1, 5])
            counter.put(*range(put, put + count))
            put += count
        elif move < 0.85 and waiting:
            waiting[dice.choice(sorted(waiting))].cancel()
        else:
            await turns(dice.randint(0, 3))
        for name, task in [*waiting.items()]:
            if task.done():
                got += [] if task.cancelled() else [task.result()]
                del waiting[name]
    await turns(200)
    got += [task.result() for task in waiting.values() if task.done() and not task.cancelled()]
    idle = [task for task in waiting.values() if not task.done()]
    assert not (counter.items and idle), "somebody waits although something is there"
    assert sorted(got + counter.items) == list(range(put))
    assert [item for _, item in counter.taken] == sorted(got), "in order"
    for task in idle:
        task.cancel()


class Carrier:
    """Deliveries that end when told to; an item's result is its double."""

    def __init__(self) -> None:
        self.deliveries: list[list[int]] = []
        self.gate = asyncio.Event()
        self.fails: list[list[int]] = []

    async def deliver(self, items: list[int]) -> list[int]:
        self.deliveries.append(items)
        await self.gate.wait()
        if items in self.fails:
            raise ConnectionError("the line is dead")
        return [2 * item for item in items]


async def test_what_comes_in_one_moment_or_during_a_delivery_travels_together_and_fails_alone() -> None:
    carrier = Carrier()
    post = Coalescer(carrier.deliver)
    failing = [asyncio.create_task(post.send(item)) for item in (1, 2)]
    await turns()
    later = [asyncio.create_task(post.send(item)) for item in (3, 4, 5)]
    await turns()
    assert carrier.deliveries == [[1, 2]]
    carrier.fails = [[1, 2]]
    carrier.gate.set()
    results = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(result) for result in results] == ["the line is dead"] * 2
    assert await asyncio.gather(*later) == [6, 8, 10]
    assert await post.send(6) == 12
    assert carrier.deliveries == [[1, 2], [3, 4, 5], [6]], "nothing is held back to fill a batch"


async def test_a_delivery_that_answers_for_another_number_of_items_is_an_error() -> None:
    async def short(items: list[int]) -> list[int]:
        return items[1:]

    with pytest.raises(ValueError, match="shorter"):
        async with asyncio.timeout(PATIENCE):
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


async def test_all_of_ends_the_others_when_one_fails() -> None:
    ended = list[str]()

    async def long() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("long")
        return 0

    async def wrong() -> int:
        await asyncio.sleep(0)
        raise ValueError("wrong")

    async def three() -> int:
        return 3

    assert await all_of([three(), three()]) == [3, 3]
    with pytest.raises(ValueError, match="wrong"):
        await all_of([long(), wrong()])
    assert ended == ["long"]
