"""Tests the weight benchmark's report: ratios within a repeat, missed targets marked."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks import weights
from benchmarks.arguments import write_json
from benchmarks.weights_measure import PublishRecord, ThroughputRecord
from benchmarks.weights_report import Results, show
from omni_async.bench.result import describe_machine


def publish(repeat: int, blocked: float, copy: float, transport: str = "disk") -> PublishRecord:
    return PublishRecord(
        "full", 10.0, transport, repeat, 10_000_000, copy, copy / 2, 3 * copy, blocked, 5 * blocked, 0.002, 0.003
    )


def window(arm: str, repeat: int, seconds: float, publishes: int = 0) -> ThroughputRecord:
    return ThroughputRecord(arm, repeat, 48, seconds, publishes)


def text(**records: Any) -> list[str]:
    given = {"publishes": [], "throughput": [], "notes": [], **records}
    console = Console(file=io.StringIO(), width=200)
    show(Results(describe_machine(), {}, **given), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line_with(lines: list[str], word: str) -> str:
    [found] = [line for line in lines if word in line]
    return found


def test_blocked_time_is_compared_with_the_copy_of_its_own_repeat() -> None:
    # A machine that is ten times slower in the second repeat changes neither ratio.
    lines = text(publishes=[publish(0, 0.0012, 0.001), publish(1, 0.012, 0.010)])
    assert "1.2 (1.2..1.2)" in line_with(lines, "disk")
    assert "2.4 (2.4..2.4)" in line_with(lines, "disk")  # of the copy in blocks
    assert "!" not in line_with(lines, "disk")


def test_a_missed_target_is_marked() -> None:
    lines = text(
        publishes=[publish(0, 0.0016, 0.001)], throughput=[window("quiet", 0, 1.0), window("periodic", 0, 1.06, 3)]
    )
    assert line_with(lines, "disk").count("!") == 1
    assert "!" in line_with(lines, "periodic") and "!" not in line_with(lines, "│ quiet")


def test_every_transport_has_a_line_in_the_order_of_measurement() -> None:
    lines = text(
        publishes=[publish(n, 0.001, 0.001, t) for n in range(3) for t in ("object_store", "disk", "collective")]
    )
    rows = [word for line in lines for word in line.split() if word in weights.TRANSPORTS]
    assert rows == ["object_store", "disk", "collective"]


def test_generation_is_compared_with_the_quiet_window_of_its_own_repeat() -> None:
    records = [
        window("quiet", 0, 1.0),
        window("back_to_back", 0, 2.0, 8),
        window("quiet", 1, 10.0),
        window("back_to_back", 1, 20.0, 80),
    ]
    line = line_with(text(throughput=records), "back to back")
    assert "0.5 (0.5..0.5)" in line
    assert "4 (4..4)" in line


def test_results_can_be_read_back(tmp_path: Path) -> None:
    results = Results(
        describe_machine(), {"repeats": 1}, [publish(0, 0.001, 0.001)], [window("quiet", 0, 1.0)], ["a note"]
    )
    assert msgspec.json.decode(write_json(tmp_path / "results.json", results).read_bytes(), type=Results) == results


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"sizes": [100.0, 10.0, 1e9], "max_mb": 50.0, **changes})


def test_sizes_that_do_not_fit_are_left_out_and_named() -> None:
    fit, notes = weights._sizes(options())
    assert fit == [10.0]
    assert [note.split(" (")[0] for note in notes] == ["left out: 100 MB", "left out: 1e+09 MB"]
    assert weights._sizes(options(max_mb=1e12))[0] == [10.0, 100.0]
