"""Tests the way from run folders to the numbers of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.staleness_plan import Cell
from benchmarks.staleness_report import aggregate, collect, markdown, write_report
from benchmarks.staleness_results import ValidationAt, images_by_update, measure
from tests.benchmarks.staleness_world import entry, plan_in, record, result

CELL = Cell(1, "decoupled_tis", 0)


def test_images_are_counted_in_admission_order_rejected_groups_included() -> None:
    # Update 1 trained groups 0 and 2 while 1 was rejected; 2 trained 5 and 3; 3 trained the overtaken 4; 6 was rejected
    # after the last.
    trained = {0: 1, 1: None, 5: 2, 2: 1, 3: 2, 4: 3, 6: None}
    ledger = [entry(group, version) for group, version in trained.items()]
    assert images_by_update(ledger, 3, group_size=10) == [30, 60, 60]


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    rewards = [float(n) for n in range(30)]
    metrics = [
        {
            "staleness/mean": min(n, 2.0),
            "log_ratio_nats/variance": 0.1 * n,
            "ess": 1.0 if n % 2 else None,
            "ess/step_00": 7.0,
            "weight/mean": 0.5 + n,
        }
        for n in range(30)
    ]
    config = plan_in(tmp_path, updates=30).config(CELL)
    run = record(config, rewards, metrics=metrics)
    measured = measure(CELL, run.path, group_size=2)
    assert (measured.staleness, measured.correction, measured.seed) == (1, "decoupled_tis", 0)
    assert (measured.run, measured.seconds) == (run.run_id, 8.0)
    assert measured.rewards == rewards
    assert measured.images == [4, *range(10, 10 + 4 * 29, 4)]
    assert measured.validation == [
        ValidationAt(0, 0, 0.25, {}),
        ValidationAt(30, measured.images[-1], 0.75, {"exact": 0.5}),
    ]
    assert measured.numbers == {
        "validation": 0.75,
        "reward_last": pytest.approx((10 + 29) / 2),
        "reward_area": pytest.approx(29 / 2),
        "staleness": pytest.approx((0 + 1 + 28 * 2) / 30),
        "log_ratio_variance": pytest.approx(0.1 * 29 / 2),
        "ess": 1.0,  # null is not a number
        "weight": pytest.approx(0.5 + 29 / 2),
        "masked": None,
        "gamma": None,
    }


def test_rows_are_means_over_seeds() -> None:
    results = [
        result(Cell(2, "none", 0), validation=0.5, weight=1.0),
        result(Cell(2, "bypass", 0), validation=0.1),
        result(Cell(2, "none", 1), validation=0.75, weight=None),
    ]
    none, bypass = aggregate(results)
    assert (none.staleness, none.correction, none.seeds) == (2, "none", [0, 1])
    assert none.mean["validation"] == 0.625 and none.each["validation"] == [0.5, 0.75]
    assert none.mean["weight"] is None, "a mean over other seeds than the other columns' would not compare"
    assert (bypass.correction, bypass.seeds, bypass.mean["validation"]) == ("bypass", [0], 0.1)


def test_the_table() -> None:
    seeds = [
        result(Cell(4, "decoupled_tis", 0), validation=0.5, reward_last=0.25, log_ratio_variance=12345.0, masked=0.0),
        result(Cell(4, "decoupled_tis", 1), validation=0.75, reward_last=0.5, log_ratio_variance=12345.0, masked=0.5),
    ]
    heading, rule, row = markdown(aggregate(seeds)).splitlines()
    cells = [text.strip() for text in row.strip("|").split("|")]
    assert dict(zip((text.strip() for text in heading.strip("|").split("|")), cells, strict=True)) == {
        "S": "4",
        "correction": "decoupled_tis",
        "seeds": "2",
        "validation": "0.625 (0.500, 0.750)",
        "reward, last 20": "0.375",
        "area": "–",
        "staleness": "–",
        "Var(L)": "1.23e+04",
        "ESS": "–",
        "weight": "–",
        "masked": "0.250",
        "gamma": "–",
    }
    assert rule.count("---") == len(cells)


def test_the_report_holds_what_is_complete_and_names_what_is_missing(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, staleness=(1,), seeds=2, corrections=("none", "bypass"))
    for cell in plan.cells()[:3]:
        record(plan.config(cell), [0.5, 1.0], metrics=[{"ess": 0.5}, {"ess": 1.0}])
    text = write_report(plan, collect(plan))
    assert (plan.out / "report.md").read_text() == text
    assert "| 1 | none | 2 | 0.750 (0.750, 0.750) | 0.750 | 0.750 |" in text
    assert "| 1 | bypass | 1 | 0.750 | 0.750 | 0.750 |" in text
    assert "1 of 4 cells are not complete: s1-bypass-seed1" in text
    written = json.loads((plan.out / "results.json").read_text())
    assert written["missing"] == ["s1-bypass-seed1"]
    assert [(row["correction"], row["mean"]["ess"]) for row in written["rows"]] == [("none", 0.75), ("bypass", 0.75)]
    assert [cell["rewards"] for cell in written["cells"]] == [[0.5, 1.0]] * 3
    assert written["updates"] == 3 and written["kappa_nats"] == 2.0
