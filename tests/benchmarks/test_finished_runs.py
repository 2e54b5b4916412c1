"""Tests when a cell counts as complete."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.finished_runs import finished_run
from benchmarks.staleness_plan import Cell, Plan
from tests.benchmarks.staleness_world import plan_in, record

CELL = Cell(1, "bypass", 0)


def found(plan: Plan, cell: Cell = CELL) -> Path | None:
    return finished_run(plan.folder(cell), plan.config(cell))


def test_a_cell_that_was_never_started_is_not_complete(tmp_path: Path) -> None:
    assert found(plan_in(tmp_path)) is None


def test_a_run_that_is_done_completes_its_cell(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    run = record(plan.config(CELL), [0.5])
    assert found(plan) == run.path


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_ended_otherwise_does_not(status, tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    record(plan.config(CELL), [0.5], status=status)
    assert found(plan) is None


@pytest.mark.parametrize("content", [None, b"", b'{"run": "x", "status": "done"}'])
def test_nor_does_one_without_a_whole_summary(content: bytes | None, tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    run = record(plan.config(CELL), [0.5])
    run.summary.unlink()
    if content is not None:
        run.summary.write_bytes(content)
    assert found(plan) is None


@pytest.mark.parametrize(
    "changes",
    [{"updates": 4}, {"extra": ("trainer.optimizer.lr=0.5",)}, {"extra": ("data.prompts=elsewhere.txt",)}],
)
def test_nor_does_one_with_other_settings(changes, tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    record(plan.config(CELL), [0.5])
    other = replace(plan, **changes)
    assert found(other) is None
    run = record(other.config(CELL), [0.5])
    assert found(other) == run.path
    assert found(plan) not in (None, run.path), "the first one is still there"


def test_nor_does_one_of_a_recipe_that_was_changed_since(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    record(plan.config(CELL), [0.5])
    plan.recipe.write_text(plan.recipe.read_text() + "algorithm: {kl_coef: 0.5}\n")
    assert found(plan_in(tmp_path)) is None


def test_nor_does_one_whose_configuration_cannot_be_read(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    record(plan.config(CELL), [0.5]).config_yaml.write_text("a_key_of_another_version: 1\n")
    assert found(plan) is None


def test_kappa_matters_to_the_correction_that_has_it_alone(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    masked = Cell(1, "decoupled_kappa_tempered", 0)
    for cell in (CELL, masked):
        record(plan.config(cell), [0.5])
    other = replace(plan, kappa_nats=0.5)
    assert found(other) is not None
    assert found(other, masked) is None


def test_the_newest_of_several_counts(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    first, second = (record(plan.config(CELL), [0.5]) for _ in range(2))
    assert first.path != second.path
    assert found(plan) == max(first.path, second.path)


def test_an_experiment_that_was_moved_is_still_complete(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "here")
    run = record(plan.config(CELL), [0.5])
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert found(plan_in(tmp_path / "there")) == tmp_path / "there" / "out" / CELL.name / run.path.name
