"""Tests the rows of the precision benchmark: they are appended, read back, and shown by correction."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import precision
from benchmarks.precision import Cell, Row, append_row, read_rows, table

ROWS = [
    Row(32.0, "none", 0, 60, -1.8, 3.1, 0.0, 0.04, 0.35, 75.0),
    Row(32.0, "bypass", 1, 60, -1.9, 3.2, 0.62, 0.03, 0.14, 75.0),
    Row(32.0, "bypass", 0, 60, -1.8, 3.1, 0.65, 0.04, 0.12, 76.0),
]


def test_finished_cells_are_read_back_and_shown_with_their_seeds_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "cells.csv"
    assert read_rows(file) == []
    for row in ROWS:
        append_row(file, row)
    assert read_rows(file) == ROWS
    assert [*table(read_rows(file))][2:] == [
        "| 32 | `bypass` | -1.80 ± 3.10, -1.90 ± 3.20 | 65%, 62% | 0.120, 0.140: 0.130 |",
        "| 32 | `none` | -1.80 ± 3.10 | 0% | 0.350: 0.350 |",
    ]


def test_a_cell_that_is_finished_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Cell] = []

    def train(cell: Cell) -> Row:
        trained.append(cell)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return Row(*cell, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(precision, "_train", train)
    arguments = ["--csv", str(tmp_path / "cells.csv"), "--corrections", "bypass", "auto", "--seeds", "1"]
    assert precision.main(arguments) == 130
    trained = trained[:1] * 2  # as if two had begun: the next ends well
    assert precision.main(arguments) == 0
    assert [cell.correction for cell in trained] == ["bypass", "bypass", "auto"]
