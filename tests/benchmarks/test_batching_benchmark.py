"""Tests the table of the benchmark of request batching."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.request_batching import Record, main, table


def test_ratios_compare_the_two_ways_of_one_batch_size_within_a_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {("step", 8): (4.0, 2.0, 4.0), ("request", 8): (2.0, 1.0, 1.0)}
    seconds |= {("step", 48): (1.0, 1.0, 1.0), ("request", 48): (1.0, 2.0, 1.0)}
    records = [
        Record(mode, batch, repeat, 10, taken[repeat], taken[repeat] / 2)  # type: ignore[arg-type]
        for repeat in range(3)
        for (mode, batch), taken in seconds.items()
    ]
    Console(width=160).print(table(records))
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = [[cell.strip() for cell in row] for row in rows]
    assert shown == [
        ["8", "step", "4.00 (3.00..4.00)", "2.5", "", "2.00 (1.50..2.00)", ""],
        ["8", "request", "1.00 (1.00..1.50)", "10.0", "2.00 (2.00..3.00)", "0.50 (0.50..0.75)", "2.00 (2.00..3.00)"],
        ["48", "step", "1.00 (1.00..1.00)", "10.0", "", "0.50 (0.50..0.50)", ""],
        ["48", "request", "1.00 (1.00..1.50)", "10.0", "1.00 (0.75..1.00)", "0.50 (0.50..0.75)", "1.00 (0.75..1.00)"],
    ]


def test_a_recipe_that_is_not_there_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err
