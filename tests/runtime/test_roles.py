"""Tests what the roles of a run are built with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from runtime_world import write_world

from omni_async.control.control_state import ControlState, LedgerState
from omni_async.preflight.check import preflight
from omni_async.runtime.builders import WorkerContext, coordinator
from omni_async.store import LocalStore
from omni_async.worker import Worker


@pytest.mark.parametrize(("untouched", "wrong"), [(False, False), (True, True)])
async def test_a_scorer_that_worked_before_is_waited_for_but_not_one_that_another_process_may_have_known_otherwise(
    tmp_path: Path, untouched: bool, wrong: bool
) -> None:
    """Distinguishes a resumed run, whose scorer may have been edited, from a process that begins again after a loss."""

    start = ControlState(version=1, next_group=2, ledger=LedgerState(2, {"trained": 2, "rejected": 0, "dropped": 0}))
    inputs = dataclasses.replace(preflight(write_world(tmp_path)), start=start, untouched=untouched)
    made = coordinator(WorkerContext(Worker("coordinator"), inputs, tmp_path, LocalStore()))
    assert await made.scorer_wrong("scorer 'x': AttributeError: y") is wrong
