"""Tests that every task has an owner: nothing outlives the block, and the first failure ends all."""

from __future__ import annotations

import asyncio

import pytest

from omni_async.aio.supervisor import Supervisor, TaskFailed
from tests.support.patience import PATIENCE


async def fail_after(turns: int, error: BaseException) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    raise error


async def test_the_first_failure_ends_all_and_names_its_task() -> None:
    ended: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may take a while
            ended.append(name)

    with pytest.raises(TaskFailed, match="reward-1: RuntimeError: out of paper") as caught:
        async with Supervisor() as supervisor:
            tasks = [supervisor.start_task(name, forever(name)) for name in ("producer-0", "trainer")]
            supervisor.start_task("reward-1", fail_after(3, RuntimeError("out of paper")))
            try:
                await supervisor.wait()
            finally:
                assert not any(task.done() for task in tasks)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"
    assert caught.value.task == "reward-1"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert sorted(ended) == ["producer-0", "trainer"]


async def test_it_waits_for_all_and_leaves_nothing_behind() -> None:
    async with Supervisor() as supervisor:
        await supervisor.wait()  # for nothing
        endless = supervisor.start_task("endless", asyncio.Event().wait())
        await asyncio.sleep(0)
    assert endless.cancelled()
    async with Supervisor() as supervisor:
        tasks = [supervisor.start_task(str(i), asyncio.sleep(0)) for i in range(3)]
        await supervisor.wait()
        assert all(task.done() for task in tasks)
        await supervisor.stop()


@pytest.mark.parametrize("turns", [0, 3])
async def test_a_failure_before_the_wait_or_of_a_task_started_during_it_is_not_missed(turns: int) -> None:
    async def restart() -> None:
        supervisor.start_task("producer-1", fail_after(1, RuntimeError("no weights")))
        await asyncio.Event().wait()

    with pytest.raises(TaskFailed, match="producer-1: RuntimeError: no weights"):
        async with Supervisor() as supervisor:
            supervisor.start_task("watchdog", restart())
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(supervisor.wait(), PATIENCE)


async def test_an_error_in_the_block_still_ends_every_task() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Supervisor() as supervisor:
            endless = supervisor.start_task("endless", asyncio.Event().wait())
            raise KeyError("mine")
    assert endless.cancelled()
