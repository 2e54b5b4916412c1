"""Tests the control-plane benchmark at a tiny size: it runs the real coordinator to the end and writes down its
measurements."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import control_plane
from benchmarks.control_plane import Roles, Shape, Stopwatch, make_config, measure, parse_shape
from omni_async.control.coordinator import Coordinator
from omni_async.control.ledger import Ledger
from omni_async.types import LedgerEntry, Prompt


def test_everything_asked_for_is_trained_and_only_once() -> None:
    entries: list[LedgerEntry] = []
    config = make_config(Shape(5, 3, 4), updates=4)
    coordinator = Coordinator(config, "run", [Prompt(0, "a")], [], entries.append)
    asyncio.run(Roles(config, coordinator).play())
    assert sorted(entry.group for entry in entries) == list(range(12))
    assert {entry.event for entry in entries} == {"trained"}
    assert isinstance(coordinator.ledger, Ledger)


def test_a_record_counts_three_events_for_each_group() -> None:
    record = measure(Shape(2, 2, 3), repeat=0, updates=4)
    assert record.samples == 24
    assert record.group_events_per_s == pytest.approx(24 / record.seconds)
    assert record.samples_per_s == pytest.approx(24 / record.seconds)
    assert 0 < record.coordinator_us == pytest.approx(1e6 * record.coordinator_seconds / 24)


def test_the_stopwatch_runs_while_a_call_runs_and_not_while_it_waits() -> None:
    class Clerk:
        def __init__(self) -> None:
            self.event = asyncio.Event()

        async def wait(self, what: str) -> str:
            await self.event.wait()
            return what

        async def fail(self) -> None:
            raise LookupError("nothing here")

    async def main() -> None:
        clerk = Clerk()
        watch = Stopwatch(clerk)  # type: ignore[arg-type]
        waiting = asyncio.create_task(watch.wait("tea"))
        await asyncio.sleep(0)
        before = watch.seconds
        await asyncio.sleep(0.02)
        assert watch.seconds == before > 0
        clerk.event.set()
        assert await waiting == "tea"
        assert watch.seconds > before
        with pytest.raises(LookupError, match="nothing here"):
            await watch.fail()

    asyncio.run(main())


def test_the_command_prints_a_table_and_writes_every_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        control_plane.main(["--shapes", "1x2x2", "3x2x2", "--repeats", "2", "--samples", "12", "--out", str(tmp_path)])
        == 0
    )
    results = json.loads((tmp_path / "results.json").read_bytes())
    assert [(r["shape"]["engines"], r["repeat"], r["updates"]) for r in results["records"]] == [
        (1, 0, 3),
        (3, 0, 3),
        (1, 1, 3),
        (3, 1, 3),
    ]
    assert results["machine"]["cpus"] >= 1
    printed = capsys.readouterr().out
    assert "group events/s" in printed and "2/2 3x2x2" in printed


@pytest.mark.parametrize("text", ["8", "8x2", "0x1x2", "1x1x1", "axbxc"])
def test_a_shape_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        parse_shape(text)
