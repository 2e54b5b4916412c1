"""Tests the task of an engine that lives on an event loop."""

import asyncio
from typing import Any

import pytest

from omni_async.rollout.base import EngineError
from omni_async.rollout.engine_task import EngineTask


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_closed_before_its_first_step_it_answers_everybody_and_leaves_no_work_behind():
    waits: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    task = EngineTask("rollout-0", lambda: [waits])
    work = asyncio.sleep(60)
    task.start(work)
    await task.close()
    assert waits.done() and isinstance(waits.exception(), EngineError)
    assert str(waits.exception()) == "rollout-0 was closed"
    assert work.cr_frame is None, "a coroutine that nobody ever awaits or closes"
