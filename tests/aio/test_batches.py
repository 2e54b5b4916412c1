"""Tests batches in virtual time: what is together in one, how many run at once, and how much may be taken in."""

from __future__ import annotations

import asyncio

import pytest

from omni_async.aio.batches import Batcher, Load, room_of

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


class Server:
    """Serves a batch in `base_s` and `item_s` for each of its items."""

    def __init__(
        self, batch: int, concurrency: int | None, base_s: float, item_s: float = 0.0, **target: float
    ) -> None:
        self.batches: list[list[int]] = []
        self.base_s, self.item_s = base_s, item_s
        self.batcher = Batcher(self.serve, Load(batch, concurrency), **target)

    async def serve(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await asyncio.sleep(self.base_s + self.item_s * len(items))
        if -1 in items:
            raise ValueError("minus one")
        return [-item for item in items]

    def submit(self, *items: int) -> list[asyncio.Future[int]]:
        return [self.batcher.submit(item) for item in items]


async def test_a_batch_is_what_waits_and_nothing_waits_to_fill_one():
    server = Server(4, 1, 1.0)
    first = server.submit(1)
    await asyncio.sleep(0.5)
    rest = server.submit(2, 3, 4, 5, 6)
    assert await asyncio.gather(*first, *rest) == [-1, -2, -3, -4, -5, -6] and now() == 3.0
    assert server.batches == [[1], [2, 3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("concurrency", "batches", "seconds"), [(2, [[0, 1, 2], [3, 4]], 1.0), (None, [[0], [1], [2], [3], [4]], 1.0)]
)
async def test_several_batches_run_at_once_and_share_what_waits(concurrency, batches, seconds):
    server = Server(4, concurrency, 1.0)
    await asyncio.gather(*server.submit(*range(5)))
    assert server.batches == batches and now() == seconds


async def test_an_error_is_its_batchs_and_a_withdrawn_item_is_not_served():
    server = Server(2, 1, 1.0)
    results = server.submit(1, -1, 2, 3, 4)
    results[3].cancel()
    outcomes = await asyncio.gather(*results, return_exceptions=True)
    assert [str(one) for one in outcomes[:2]] == ["minus one"] * 2 and outcomes[2] == -2 and outcomes[4] == -4
    assert server.batches == [[1, -1], [2, 4]]
    assert vars(server.batcher.load) | {"waiting": 0, "running": 0, "items_running": 0} == vars(server.batcher.load)


async def test_batches_are_made_as_large_as_the_latency_allows():
    server = Server(16, 1, 0.0, item_s=0.5, latency_s=2.2)
    await asyncio.gather(*server.submit(*range(20)))
    sizes = [len(batch) for batch in server.batches]
    assert sizes[0] == 1 and set(sizes[1:-1]) == {4}


async def test_what_waits_and_runs_is_cancelled_at_the_end():
    server = Server(1, 1, 100.0)
    results = server.submit(1, 2)
    await asyncio.sleep(1)
    await server.batcher.close()
    await asyncio.wait(results)
    assert all(result.cancelled() for result in results) and now() == 1.0


def loaded(concurrency: int | None, waiting: int = 0, running: int = 0) -> Load:
    load = Load(4, concurrency)
    load.waiting, load.running, load.items_running = waiting, running, 4 * running
    return load


@pytest.mark.parametrize(
    ("loads", "coming", "room"),
    [
        ([loaded(1)], 0, 4),
        ([loaded(1, running=1)], 0, 0),
        ([loaded(1, waiting=1)], 0, 0),
        ([loaded(1)], 2, 0),
        ([loaded(3, running=1)], 1, 4),
        ([loaded(1, running=1), loaded(1)], 0, 4),  # the one that is free may begin, the other has a round to come
        ([loaded(1, waiting=4, running=1), loaded(1)], 0, 0),
        ([loaded(1, waiting=2, running=1), loaded(None)], 0, 2),
    ],
)
def test_as_much_is_taken_in_as_one_could_begin_and_no_other_would_pile_up(loads, coming, room):
    assert room_of(loads, coming) == room
