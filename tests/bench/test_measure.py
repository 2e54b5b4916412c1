"""Tests a run's numbers from the folder it left behind."""

from __future__ import annotations

import json

import pytest

from omni_async.bench.measure import NotMeasurableError, measure, run_profile, steady_part
from omni_async.config import ConfigError, load
from omni_async.preflight.check import preflight
from omni_async.types import Span
from tests.bench import overlap_world as world

SYNC = ("schedule=sync",)


def inputs(tmp_path, *overrides):
    recipe = world.write_recipe(tmp_path)
    return preflight(load(recipe, [f"run.dir={tmp_path / 'runs'}", *overrides]))


def test_a_synchronous_run_is_measured_exactly(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12), staleness=[0] * 48, memory=3 * 2**30, profile=world.PROFILE)
    found = measure(run.path, given.config)
    assert found.updates == 10
    assert found.step_s == pytest.approx(world.SYNC_STEP, abs=1e-5)
    assert found.steps_s == pytest.approx([world.SYNC_STEP] * 10, abs=1e-5)
    assert sum(found.attribution.values()) == pytest.approx(found.step_s, abs=1e-9)
    assert found.attribution["tail"] == pytest.approx(world.TAIL, abs=1e-5)
    assert found.images_per_s == pytest.approx(world.GROUPS * world.SIZE / world.SYNC_STEP, abs=1e-5)
    assert found.images_per_s_per_device == pytest.approx(
        found.images_per_s / 4
    )  # two engines, a reward worker, a trainer
    assert (found.staleness, found.peak_memory_bytes) == ({0: 48}, 3 * 2**30)


def test_stage_times_are_busy_seconds_of_a_device_and_their_variation_is_the_profiles(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12), profile=world.PROFILE)
    stages = measure(run.path, given.config).stages
    assert {name: stage.seconds for name, stage in stages.items()} == pytest.approx(
        {
            "generation": world.GENERATION + world.TAIL / 2,
            "reward": world.REWARD,
            "training": world.TRAINING + world.RECOMPUTE,
            "export": world.EXPORT,
            "publish": world.PUBLISH,
        },
        abs=1e-5,
    )
    assert (stages["generation"].variation, stages["reward"].variation) == (0.1, 0.0)


def test_without_a_profile_the_variation_is_not_known(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12))
    assert measure(run.path, given.config).stages["generation"].variation is None


def test_roles_are_busy_or_wait_in_the_steady_part_alone(tmp_path):
    given = inputs(tmp_path, *SYNC)
    spans, finished = world.sync_spans(12)
    run, _ = world.write_run(given, [*spans, Span("reward-0", "starved", world.ORIGIN - 500, finished[2])], finished)
    busy = measure(run.path, given.config).busy
    generating = world.GENERATION + world.TAIL / 2
    assert busy["rollout"]["busy"] == pytest.approx(generating / world.SYNC_STEP, abs=1e-4)
    waiting = world.GENERATION + world.TAIL + world.REWARD + world.CONTROL
    assert busy["trainer"]["starved"] == pytest.approx(waiting / world.SYNC_STEP, abs=1e-4)
    assert busy["reward"]["starved"] == pytest.approx(0, abs=1e-4)


def test_warm_up_and_drain_are_left_out(tmp_path):
    given = inputs(tmp_path, "schedule=async", "staleness.max_updates=2")
    slow, fast = 7.0, 1.0
    finished, spans, now = {}, [], world.ORIGIN
    for update in range(1, 13):
        step = fast if 4 < update <= 10 else slow
        spans.append(Span("trainer", "train", now, now + step, {"version": update - 1}))
        now += step
        finished[update] = now
    run, _ = world.write_run(given, spans, finished)
    found = measure(run.path, given.config)
    assert (found.updates, found.step_s) == (6, pytest.approx(fast, abs=1e-6))
    assert found.attribution["training"] == pytest.approx(fast, abs=1e-5)


@pytest.mark.parametrize(("budget", "first"), [(0, 2), (1, 3), (2, 4), (8, 10)])
def test_the_steady_part_leaves_out_the_pipelines_filling_and_draining(tmp_path, budget, first):
    def part(updates):
        return steady_part(
            inputs(tmp_path, "schedule=async", f"staleness.max_updates={budget}", f"trainer.updates={updates}").config
        )

    period = budget + 1
    assert part(40) == (first, first + (40 - budget - first) // period * period)
    fewest = first + 4 + budget
    assert part(fewest)[0] == first < part(fewest)[1] <= fewest - budget
    with pytest.raises(ConfigError, match=rf"^trainer.updates: {fewest - 1} are too few.*at least --updates {fewest}$"):
        part(fewest - 1)


def test_a_profile_that_cannot_be_read_is_none(tmp_path):
    (tmp_path / "profile.json").write_text("{}")
    assert run_profile(tmp_path) is None


def test_an_update_without_its_line_is_an_error_and_no_number(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(11))
    with pytest.raises(NotMeasurableError, match="expected updates 1 to 12, found 11"):
        measure(run.path, given.config)


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "trace.json"])
def test_a_file_that_is_missing_or_cut_off_is_an_error(tmp_path, name):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12))
    file = run.path / name
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(NotMeasurableError, match=str(run.path)):
        measure(run.path, given.config)
    file.unlink()
    with pytest.raises(NotMeasurableError, match=str(run.path)):
        measure(run.path, given.config)


def test_a_trace_of_something_else_is_an_error(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12))
    run.trace.write_text(json.dumps({"traceEvents": [{"ph": "X"}]}))
    with pytest.raises(NotMeasurableError, match="KeyError"):
        measure(run.path, given.config)
