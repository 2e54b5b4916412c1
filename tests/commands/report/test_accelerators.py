"""Tests the charts of accelerators in a report, and the count of scorers that rewards were made without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from omni_async.commands.report.blocks import Chart, Table
from omni_async.commands.report.operation import endings, throughput
from omni_async.commands.report.shown import show
from omni_async.records.read.record import read_run
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from tests.support.made_run import MadeRun


def charts(*folders: Path) -> dict[str, Chart]:
    section = throughput(show([read_run(folder) for folder in folders]))
    return {block.id: block for block in section.blocks if isinstance(block, Chart)}


def test_every_accelerator_has_a_curve_of_its_memory_and_of_its_utilisation(tmp_path: Path) -> None:
    made, run = MadeRun(groups=20), RunDirectory(tmp_path / "run")
    made.write(run.path)
    assert not any(name.startswith("device") for name in charts(run.path))
    for update in (3, 4):
        numbers: dict[str, Any] = {f"device/{n}/memory_bytes": (n + update) * 2**30 for n in (0, 10, 2)}
        run.append_metrics(update, {**made.metrics(update), **numbers, "device/0/utilisation": 0.25, "device/x/y": 1})
    found = charts(run.path)
    memory, busy = found["device-memory"], found["device-utilisation"]
    assert [(one.name, one.y) for one in memory.series] == [("0", [3, 4]), ("2", [5, 6]), ("10", [13, 14])]
    assert memory.series[0].x["update"] == [3, 4] and (memory.y.unit, busy.y.unit) == ("GiB", "%")
    assert [(one.name, one.y) for one in busy.series] == [("0", [25, 25])]
    made.write(tmp_path / "other")
    assert [one.name for one in charts(run.path, tmp_path / "other")["device-utilisation"].series] == ["run, 0"]


def test_scorers_that_rewards_were_made_without_are_counted(tmp_path: Path) -> None:
    made = MadeRun(groups=20)
    run = made.write(tmp_path)
    for group in (20, 21):
        append_jsonl(run.ledger, replace(made.entry(group), left_out=("judge",)))
    (tab,) = endings(show([read_run(tmp_path)])).tabs
    (table,) = (block for block in tab.blocks if isinstance(block, Table) and block.id == "without")
    assert table.rows == [["judge", "2"]]
