"""Tests the learning benchmark: curves from run folders, the moment a reward was reached, and the table made of
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learning import common_reward, main, read_curve, table
from benchmarks.learning_plot import Curve, draw


def curve(arm: str, validation: list[tuple[float, int, float]], seconds: float = 30.0) -> Curve:
    return Curve(arm, 0, [seconds / 3, seconds / 1.5, seconds], [8, 16, 24], [0.1, 0.2, 0.3], validation)


def test_a_curve_starts_when_the_first_update_began_and_validation_lies_at_its_version(tmp_path: Path):
    lines = [
        {"update": 0, "validation/reward": 0.25},
        {"update": 1, "finished": 1010.0, "update_s": 6.0, "images": 8, "reward": 0.5},
        {"update": 2, "finished": 1015.0, "update_s": 5.0, "images": 16, "reward": 0.75},
        {"update": 2, "validation/reward": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_curve(tmp_path, "sync", 3)
    assert found == Curve("sync", 3, [6.0, 11.0], [8, 16], [0.5, 0.75], [(0.0, 0, 0.25), (11.0, 16, 0.5)])


def test_a_reward_is_reached_on_the_line_between_two_rounds():
    found = curve("sync", [(0.0, 0, 0.2), (10.0, 8, 0.4), (30.0, 24, 0.8)])
    assert found.seconds_to(0.4) == 10.0
    assert found.seconds_to(0.6) == pytest.approx(20.0)
    assert found.seconds_to(0.1) == 0.0
    assert found.seconds_to(0.9) is None


def test_arms_are_compared_at_the_reward_that_all_runs_reached():
    slow, fast = (
        curve("sync", [(0.0, 0, 0.2), (40.0, 24, 0.8)], 40.0),
        curve("async:2", [(0.0, 0, 0.2), (20.0, 24, 0.6)], 20.0),
    )
    assert common_reward([slow, fast]) == 0.6
    rows = table([slow, fast]).splitlines()
    assert "seconds to validation 0.600" in rows[0]
    assert rows[2].startswith("| sync | 1 | 40 | 0.200 -> 0.800 | 27 (27) |")
    assert rows[3].startswith("| async:2 | 1 | 20 | 0.200 -> 0.600 | 20 (20) |")


def test_without_validation_nothing_is_claimed_about_it():
    found = [curve("sync", []), curve("async:2", [])]
    assert common_reward(found) is None
    assert table(found).splitlines()[2].endswith("| – | – |")


def test_the_figure_is_drawn(tmp_path: Path):
    found = [curve("sync", [(0.0, 0, 0.2), (40.0, 24, 0.8)]), curve("async:2", [(0.0, 0, 0.2), (20.0, 24, 0.6)])]
    draw(found, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes()[:4] == b"\x89PNG"


def test_a_wrong_recipe_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--recipe", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
