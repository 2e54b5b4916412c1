"""Tests the figures of docs/tuning.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tuning_plots
from benchmarks.tuning_plots import Reserved, reserve_plot, reserve_table, reserved, staleness
from omni_async.config import load
from omni_async.config.schedule import SCHEDULES
from omni_async.performance.law import async_step
from omni_async.performance.profile import write_profile
from omni_async.simulation.result import times_of
from tests.simulation.simulation_world import make_config, make_profile
from tests.simulation.tune.tune_world import PROFILE, RECIPE


def test_figures_show_law_and_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(Path("steady.json"), PROFILE)
    said: list[str] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "emulation: {profile: steady.json}\n")
    steps, ages = staleness(recipe, load(recipe, ["schedule=async"]), PROFILE, said.append).axes
    lines = {line.get_label(): line for line in steps.get_lines()}
    law = [async_step(times_of(load(recipe, [f"staleness.max_updates={s}"]), PROFILE), s) for s in range(5)]
    assert list(lines["law"].get_ydata()) == pytest.approx(law)
    assert list(lines["simulated"].get_ydata()) == pytest.approx(law, rel=0.1)
    assert {text.get_text() for text in steps.texts} == set(SCHEDULES) - {"async"}
    assert all(age <= s for line in ages.get_lines() for s, age in zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert len(said) == 5 + 4


def test_a_reserve_costs_staleness_and_covers_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes 1 s per group, 4 groups an update, and engines a sixth of that."""
    monkeypatch.setattr(tuning_plots, "_UPDATES", 40)
    config = make_config(rollout__group_size=4, trainer__groups_per_update=4, algorithm__correction__mode="bypass")
    profile = make_profile(generate=0.1, train=1.0)
    found = reserved(config, profile, [0, 4, "all"], lambda line: None)
    assert [one.groups for one in found] == [pytest.approx(0, abs=0.1), pytest.approx(4, abs=0.1), None]
    young, older, oldest = found
    assert young.staleness < older.staleness < oldest.staleness
    assert young.lost == pytest.approx((1, 3, 10), abs=0.3) and older.lost == pytest.approx((0, 2, 9), abs=0.3)
    assert oldest.lost[1] == pytest.approx(0, abs=0.1)


def test_the_reserve_s_table_and_plot_show_every_row() -> None:
    rows = [Reserved(0, 0.0, 1.0, (1.0, 3.0, 10.0)), Reserved("auto", 6.0, 1.5, (-0.01, 1.5, 8.5))]
    rows.append(Reserved("all", None, 7.0, (0.0, 0.0, 3.0)))
    assert [*reserve_table(rows, 4)][2:] == [
        "| `0` | 0.0 | 1.00 | 1.0 | 3.0 | 10.0 |",
        "| `auto` | 1.5 | 1.50 | 0.0 | 1.5 | 8.5 |",
        "| `all` |  | 7.00 | 0.0 | 0.0 | 3.0 |",
    ]
    ages, losses = reserve_plot(rows, 4).axes
    assert [tuple(line.get_ydata()) for line in ages.get_lines()] == [(1.0,), (1.5,), (7.0, 7.0)]
    assert len(losses.get_lines()) == 9
