"""Tests the picture that README.md opens with, and the numbers below it."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from benchmarks import just_in_time
from benchmarks.just_in_time import Row, first_picture, read_rows, time_ratios
from benchmarks.lanes import lanes_of
from omni_async.config import load
from omni_async.simulation.simulate import simulate
from tests.support.job_world import PROFILE, write_emulated
from tests.support.places import ROOT

CSV = Path(just_in_time.__file__).with_suffix(".csv")


def row(arm: str, seed: int, seconds: float) -> Row:
    at_s = (0.0, seconds / 2, seconds)
    return Row("trainer_bound", arm, seed, 60, seconds, 0.0, 0.0, (0, 30, 60), at_s, (0.2, 0.5, 0.8))


def test_lanes_have_the_updates_and_the_busy_time_of_either_schedule(tmp_path: Path) -> None:
    recipe = write_emulated(tmp_path, rollout={"max_batch": 8, "max_inflight": 16}, validation=None)
    in_step, overlapped = lanes_of(recipe)
    assert [*in_step.busy] == [*overlapped.busy] == ["rollout-0", "rollout-1", "reward-0", "trainer"]
    assert len(in_step.ends) == 2 and len(overlapped.ends) > 2
    span = in_step.ends[-1]
    for lanes in (in_step, overlapped):
        assert all(0 <= a < b <= span + 1e-6 for busy in lanes.busy.values() for a, b in busy)
    for schedule, lanes in (("sync", in_step), ("async", overlapped)):
        expected = simulate(load(recipe, [f"schedule={schedule}"]), PROFILE, updates=20)
        assert lanes.update_s == pytest.approx(expected.step_s, rel=0.05)
    shares = [[sum(b - a for a, b in busy) / span for busy in one.busy.values()] for one in (in_step, overlapped)]
    assert max(shares[1]) > 0.9 > max(shares[0])
    figure = first_picture([row("synchronous", 0, 100.0), row("just_in_time", 0, 75.0)], in_step, overlapped)
    curves, drawn = figure.axes
    assert [line.get_xdata()[-1] for line in curves.get_lines() if line.get_linewidth() == 2] == [100.0, 75.0]
    assert [text.get_text() for text in drawn.texts] == [
        f"synchronous: an update takes {in_step.update_s:.0f} s",
        f"asynchronous: an update takes {overlapped.update_s:.0f} s",
    ]


def test_ratios_are_those_of_equal_seeds() -> None:
    rows = [row("synchronous", 0, 100.0), row("just_in_time", 0, 75.0), row("synchronous", 1, 100.0)]
    assert time_ratios(rows) == [0.75]


def test_the_readme_has_the_numbers_of_the_measured_runs() -> None:
    rows = [one for one in read_rows(CSV) if (one.job, one.updates) == ("trainer_bound", 60)]
    young, in_step = ({one.seed: one for one in rows if one.arm == arm} for arm in ("just_in_time", "synchronous"))
    ends = [fmean(one.rewards[-1] for one in arm.values()) for arm in (young, in_step)]
    meanwhile = fmean(
        float(np.interp(young[seed].seconds, in_step[seed].at_s, in_step[seed].rewards)) for seed in young
    )
    text = " ".join((ROOT / "README.md").read_text().partition("## Run it")[0].split())
    number = r"(\d\.\d+)"
    found = re.search(
        rf"take {number} of the time of 60 .* a reward of {number}; .* has {number} after as many .* and {number}", text
    )
    assert found is not None
    expected = (ends[0], meanwhile, ends[1])
    assert found.groups() == (f"{median(time_ratios(rows)):.2f}", *(f"{reward:.3f}" for reward in expected))
