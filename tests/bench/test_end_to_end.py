"""Tests benchmarks that really run, on emulated devices."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from omni_async.bench.comparison import compare
from omni_async.bench.overlap import run_overlap
from omni_async.bench.result import Overlap
from omni_async.performance.profile import Payload, Profile, write_profile
from omni_async.performance.service import ServiceTime
from omni_async.tracking.summary import read_summary
from tests.bench import overlap_world as world

pytestmark = pytest.mark.slow

# Nothing varies, so that no device can be faster than the law says.
STEADY = Profile(
    name="steady",
    source="made up",
    generate=ServiceTime(unit_s=0.5),
    score=ServiceTime(unit_s=0.25),
    train=ServiceTime(unit_s=0.25),
    step=ServiceTime(fixed_s=0.5),
    export=ServiceTime(fixed_s=0.2),
    publish=ServiceTime(fixed_s=0.3),
    swap=ServiceTime(fixed_s=0.1),
    switch=ServiceTime(fixed_s=0.5),
    payload=Payload(trajectory=4096, media=1024, weights=65536),
)


def bench(folder: Path, *overrides: str, **options) -> Overlap:
    recipe = world.write_recipe(folder, emulation={"time_scale": 0.02})
    write_profile(folder / "toy.json", STEADY)
    return run_overlap(recipe, overrides, out=folder / "out", terminal=Console(file=io.StringIO()), **options)


def test_schedules_on_emulated_devices_of_one_process(tmp_path):
    arms = ["sync", "sync_colocated", "async_reward", "one_step_off", "async:1"]
    overlap = bench(tmp_path, arms=arms, repeats=1, updates=9)
    assert [run.reason for arm in overlap.arms for run in arm.runs] == [None] * len(arms)
    found = compare(overlap)
    assert list(found) == arms
    for arm in found.values():
        assert sum(arm.attribution.values()) == pytest.approx(arm.step_s.median)
        assert arm.step_s.median > 0.99 * arm.law_s
        assert arm.simulated_s > 0.99 * arm.law_s
        assert arm.attribution["training"] > 0.99 * 0.02 * world.GROUPS * (world.SIZE * 0.25) / (
            4 if arm.name == "sync_colocated" else 1
        )
        assert set(arm.busy) >= {"rollout", "reward", "trainer"}
        assert sum(arm.staleness.values()) == 9 * world.GROUPS
    assert {name: arm.staleness_max for name, arm in found.items()} == dict.fromkeys(arms, 0) | {
        "one_step_off": 1,
        "async:1": 1,
    }
    # In step, reward workers wait for the last sample and the trainer for the last score.
    sync = found["sync"].attribution
    per_engine, samples = world.GROUPS * world.SIZE / 2, world.GROUPS * world.SIZE
    assert sync["generation"] + sync["tail"] > 0.99 * 0.02 * per_engine * 0.5
    assert sync["reward"] > 0.99 * 0.02 * samples * 0.25
    assert sync["switch"] == 0 < found["sync_colocated"].attribution["switch"]


@pytest.mark.thorough
def test_all_runs_of_a_benchmark_share_one_ray(tmp_path):
    import ray

    overlap = bench(tmp_path, "run.runtime=ray", arms=["async:0"], repeats=2, updates=6)
    assert [run.reason for arm in overlap.arms for run in arm.runs] == [None, None]
    assert not ray.is_initialized()
    for run in overlap.arms[0].runs:
        assert read_summary(tmp_path / "out" / run.folder / "summary.json").conserved
