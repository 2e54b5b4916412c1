"""Tests the event loop on virtual time: it jumps, it is reproducible, and it notices when nothing can go on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from omni_async.aio.waiting import Event
from omni_async.simulation.virtual_time import DeadlockError, VirtualClock, VirtualTimeLoop, run

pytestmark = pytest.mark.virtual_time


def loop_of_this() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


# ---- time ------------------------------------------------------------------------------------------------------------


def test_time_starts_where_it_is_set_and_a_year_of_sleep_is_a_jump_that_the_clock_shows() -> None:
    async def main() -> tuple[float, float, float]:
        clock = VirtualClock()
        before = clock.now()
        await asyncio.sleep(365 * 86_400)
        return before, clock.now(), asyncio.get_running_loop().time()

    assert run(main(), start=1e9) == (1e9, 1e9 + 365 * 86_400, 1e9 + 365 * 86_400)
    assert run(main())[0] == 0


async def test_sleepers_wake_in_the_order_of_their_times_and_those_of_one_time_in_the_order_they_slept() -> None:
    woken = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(name)

    await asyncio.gather(sleeper("c", 2), sleeper("a", 1), sleeper("b", 1), sleeper("d", 2))
    assert woken == ["a", "b", "c", "d"]


async def test_times_that_differ_by_rounding_are_one_instant() -> None:
    loop, fired = loop_of_this(), []
    loop.call_when(0.3, fired.append, 1)
    loop.call_when(0.1 + 0.2, fired.append, 2)
    assert 0.1 + 0.2 != 0.3
    await loop.sleep_until(0.3 - 1e-12)
    assert len(fired) == 2


async def test_a_timer_that_is_due_is_not_kept_waiting_by_a_task_that_only_yields() -> None:
    done: list[bool] = []
    asyncio.get_running_loop().call_later(0, done.append, True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert done


async def test_a_timeout_counts_virtual_seconds() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.sleep(60)
    async with asyncio.timeout(30):
        await asyncio.sleep(29)
    assert loop_of_this().time() == 59


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


def test_the_same_program_runs_the_same_way_twice() -> None:
    async def main() -> list[tuple[float, int]]:
        drawn, log, lock = random.Random(3), [], asyncio.Lock()

        async def worker(number: int) -> None:
            for _ in range(5):
                await asyncio.sleep(drawn.choice([0, 0.5, 1]))
                async with lock:
                    await asyncio.sleep(drawn.choice([0, 0.25]))
                    log.append((asyncio.get_running_loop().time(), number))

        await asyncio.gather(*(worker(number) for number in range(8)))
        return log

    assert run(main()) == run(main())


# ---- asyncio itself --------------------------------------------------------------------------------------------------


def test_what_is_left_at_the_end_is_cancelled_or_closed_and_cleans_up() -> None:
    log: list[Any] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(3)
            log.append(asyncio.get_running_loop().time())

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            log.append("closed")

    async def main() -> None:
        global _kept
        task, _kept = asyncio.create_task(forever()), numbers()
        await asyncio.sleep(1)
        assert not task.done() and await anext(_kept) == 1

    run(main())
    assert log == [4, "closed"]


async def test_functions_for_threads_are_called_at_once_and_their_errors_are_raised() -> None:
    def fails() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await asyncio.to_thread(fails)
    assert await asyncio.to_thread(threading.current_thread) is threading.current_thread()


async def test_a_thread_of_its_own_can_still_hand_something_in() -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(arrived.set))
    thread.start()
    thread.join()
    await arrived.wait()


async def test_it_does_not_run_inside_another_loop() -> None:
    work = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="running event loop"):
        run(work)
    work.close()


def test_a_closed_loop_takes_nothing_more() -> None:
    loop = VirtualTimeLoop()
    loop.close()
    work = asyncio.sleep(0)
    schedules = (loop.call_soon, lambda what: loop.call_at(1, what), lambda what: loop.call_later(1, what))
    for schedule in (*schedules, lambda _: loop.create_task(work)):
        with pytest.raises(RuntimeError, match="closed"):
            schedule(print)
    work.close()


# ---- what only this loop has -----------------------------------------------------------------------------------------


async def test_sleep_until_the_past_returns_without_moving_time_and_a_cancelled_one_is_forgotten() -> None:
    loop = loop_of_this()
    await asyncio.sleep(5)
    await loop.sleep_until(2)
    assert loop.time() == 5
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await loop.sleep_until(10)
    await asyncio.sleep(20)
    assert loop.time() == 26


async def test_what_settles_comes_after_everything_else_of_the_instant_and_before_the_next() -> None:
    loop, log = loop_of_this(), []

    async def chain() -> None:
        for link in range(3):
            await asyncio.sleep(0)
            log.append(f"link {link}")

    loop.when_settled(lambda: log.append("settled"))
    loop.call_when(1, log.append, "later")
    loop.call_when(0, log.append, "due")
    await asyncio.gather(chain(), loop.sleep_until(2))
    assert log == ["due", "link 0", "link 1", "link 2", "settled", "later"]


@pytest.mark.parametrize(
    "schedule",
    [lambda loop, fails: loop.call_when(3, fails), lambda loop, fails: loop.when_settled(fails)],
    ids=["timer", "settled"],
)
def test_what_a_simple_callback_raises_ends_the_run(schedule: Callable[[Any, Any], None]) -> None:
    def fails() -> None:
        raise ValueError("a bug")

    async def main() -> None:
        schedule(loop_of_this(), fails)
        await asyncio.sleep(10)

    with pytest.raises(ValueError, match="a bug"):
        run(main())


# ---- deadlocks -------------------------------------------------------------------------------------------------------


def test_a_deadlock_is_raised_at_once_and_lists_the_waiting_tasks() -> None:
    event = Event()

    async def producer() -> None:
        await event.wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer(), name="producer-0")
            tasks.create_task(asyncio.sleep(3), name="sleeper")

    with pytest.raises(DeadlockError) as caught:
        run(main())
    first, *lines = str(caught.value).splitlines()
    assert first == "all 2 tasks wait and no timer is pending:"
    (line,) = [line for line in lines if line.startswith("  producer-0: ")]
    assert "producer (test_virtual_time.py:" in line and "> Event.wait (waiting.py:" in line
    assert not any("sleeper" in line for line in lines)


def test_of_many_tasks_the_first_are_listed() -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(50)))

    with pytest.raises(DeadlockError, match=r"all 51 tasks wait[\s\S]*and 31 more$"):
        run(main())


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
