"""Tests the event loop on virtual time: it jumps, it is reproducible, and it notices when nothing can go on."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from omni_async.aio.waiting import Event
from omni_async.simulation.virtual_time import DeadlockError, VirtualClock, VirtualTimeLoop, run
from omni_async.simulation.world import at_once

pytestmark = pytest.mark.virtual_time


def loop_of_this() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def test_time_starts_where_it_is_set_and_a_year_of_sleep_is_a_jump_that_the_clock_shows() -> None:
    async def main() -> tuple[float, float, float]:
        clock = VirtualClock()
        before = clock.now()
        await asyncio.sleep(365 * 86_400)
        return before, clock.now(), asyncio.get_running_loop().time()

    assert run(main(), start=1e9) == (1e9, 1e9 + 365 * 86_400, 1e9 + 365 * 86_400)
    assert run(main())[0] == 0


async def test_times_that_differ_by_rounding_are_one_instant() -> None:
    loop, fired = loop_of_this(), []
    loop.call_when(0.3, fired.append, 1)
    loop.call_when(0.1 + 0.2, fired.append, 2)
    assert 0.1 + 0.2 != 0.3
    await loop.sleep_until(0.3 - 1e-12)
    assert len(fired) == 2


async def test_a_timeout_counts_virtual_seconds_and_leaves_nothing_behind() -> None:
    loop = loop_of_this()
    for wait in (lambda: asyncio.sleep(60), lambda: loop.sleep_until(60)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await wait()
    async with asyncio.timeout(30):
        await asyncio.sleep(29)
    await loop.sleep_until(2)  # the past
    assert loop.time() == 5 + 5 + 29
    await asyncio.sleep(60)  # what was to wake a sleeper that is gone comes now
    assert loop.time() == 99


async def test_a_cancelled_timer_neither_fires_nor_moves_time_nor_is_kept() -> None:
    loop, fired = loop_of_this(), []
    loop.call_later(5, fired.append, 1).cancel()
    loop.call_later(7, fired.append, 2)
    timer = loop.call_later(9, fired.append, 3)
    await asyncio.sleep(8)
    timer.cancel()
    await asyncio.sleep(0.5)
    assert (loop.time(), fired) == (8.5, [2])
    for _ in range(5000):
        async with asyncio.timeout(1e6):
            await asyncio.sleep(1)
    assert len(loop._timers) < 300


async def test_functions_for_threads_are_called_at_once_and_a_thread_of_its_own_can_hand_something_in() -> None:
    def fails() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await asyncio.to_thread(fails)
    assert await asyncio.to_thread(threading.current_thread) is threading.current_thread()
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(arrived.set))
    thread.start()
    thread.join()
    await arrived.wait()


@pytest.mark.parametrize("when", ["due", "settled"])
def test_what_a_simple_callback_raises_ends_the_run(when: str) -> None:
    def fails() -> None:
        raise ValueError("a bug")

    async def main() -> None:
        loop = loop_of_this()
        loop.when_settled(fails) if when == "settled" else loop.call_when(3, fails)
        await asyncio.sleep(10)

    with pytest.raises(ValueError, match="a bug"):
        run(main())


def test_a_deadlock_is_raised_at_once_and_lists_the_first_waiting_tasks() -> None:
    event = Event()

    async def produce() -> None:
        await event.wait()

    async def main(producers: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(producers):
                tasks.create_task(produce(), name=f"producer-{number}")
            tasks.create_task(asyncio.sleep(3), name="sleeper")

    with pytest.raises(DeadlockError) as caught:
        run(main(1))
    first, *lines = str(caught.value).splitlines()
    assert first == "all 2 tasks wait and no timer is pending:"
    (line,) = [line for line in lines if line.startswith("  producer-0: ")]
    assert "produce (test_virtual_time.py:" in line and "> Event.wait (waiting.py:" in line
    assert not any("sleeper" in line for line in lines)
    with pytest.raises(DeadlockError, match=r"all 51 tasks wait[\s\S]*and 31 more$"):
        run(main(50))


def test_a_pending_timer_is_no_deadlock_and_a_cancelled_one_does_not_hide_it() -> None:
    cleaned = []

    async def main(cancel: bool) -> float:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        timer = loop.call_later(100, event.set)
        if cancel:
            timer.cancel()
        try:
            await event.wait()
        finally:
            await asyncio.sleep(2)  # tasks clean up after a deadlock, in virtual time
            cleaned.append(loop.time())
        return loop.time()

    assert run(main(cancel=False)) == 102
    with pytest.raises(DeadlockError):
        run(main(cancel=True))
    assert cleaned == [102, 2]


def test_dice_decide_in_which_order_ready_tasks_run() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            order.append(number)

        await asyncio.gather(*(note(number) for number in range(10)))
        return order

    orders = [run(main(), dice=random.Random(seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == [*range(10)] == run(main())


async def test_a_group_of_tasks_is_cancelled_in_the_order_of_its_tasks() -> None:
    """Cancels tasks that asyncio keeps in a set: by address, the order would differ from process to process."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            order.append(number)

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(wait(number))
            tasks.create_task(fail())
    assert order == [*range(20)]


async def test_a_call_that_would_wait_is_refused_where_no_caller_can_wait() -> None:
    with pytest.raises(RuntimeError, match="waits"):
        at_once(Event().wait())
