"""Tests the figures of docs/tuning.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tuning_plots import staleness
from omni_async.config import load
from omni_async.config.schedule import SCHEDULES
from omni_async.performance.law import async_step
from omni_async.performance.profile import write_profile
from omni_async.simulation.result import times_of
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
