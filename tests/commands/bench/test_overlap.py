"""Tests a whole benchmark with runs that take no time, and one that really runs, on emulated devices."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from omni_async.commands.bench.comparison import compare
from omni_async.commands.bench.measure import attribute
from omni_async.commands.bench.overlap import run_overlap
from omni_async.commands.bench.result import Overlap, read_overlap, spread
from omni_async.config import load
from omni_async.performance.law import async_step
from omni_async.performance.profile import Payload, Profile, ServiceTime, load_profile, write_profile
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write.summary import read_summary
from omni_async.simulation.result import times_of
from tests.commands.bench import overlap_world as world
from tests.runtime.runtime_world import write_world

ARMS = ("sync", "async:1", "async:2")
STEPS = {"async-1": 8.0, "async-2": 5.0}


def bench(tmp_path, train, *overrides, arms=ARMS, repeats=3, simulator=world.half_the_profile, recipe=None):
    """Runs a benchmark of emulated devices, or of `recipe`; returns its result and what it says."""
    said = io.StringIO()
    recipe = recipe or world.write_recipe(tmp_path)
    terminal, out = Console(file=said, width=200), tmp_path / "out"
    given = {"arms": arms, "repeats": repeats, "terminal": terminal, "train": train, "simulator": simulator}
    return run_overlap(recipe, overrides, out=out, **given), said.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Returns a benchmark that ran through: its folder, the result, and its output."""
    folder = tmp_path_factory.mktemp("done")
    return folder, *bench(folder, world.FakeTrain(STEPS))


def test_the_result_has_the_median_over_rounds_and_every_rounds_number_and_compares_runs_of_the_same_round(done):
    _, overlap, _ = done
    found, steps = compare(overlap)["async:2"], [5 + number / 64 for number in range(3)]
    spread_of_steps = (5 + 1 / 128, 5 + 1 / 64, 5 + 3 / 128)
    assert (found.step_s.low, found.step_s.median, found.step_s.high) == pytest.approx(spread_of_steps, abs=1e-5)
    assert [run.measured.step_s for run in overlap.arms[2].runs] == pytest.approx(steps, abs=1e-5)
    assert [run.round for run in overlap.arms[2].runs] == [0, 1, 2]
    assert found.staleness == {0: 3 * 4, 1: 3 * 4, 2: 3 * 4 * 10}
    assert (found.staleness_max, found.staleness_mean) == (2, pytest.approx((1 * 4 + 2 * 40) / 48))
    speedup, ratios = found.speedups["sync"], [world.SYNC_STEP / step for step in steps]
    assert speedup.ratio.median == pytest.approx(sorted(ratios)[1], abs=1e-5)
    assert speedup.ratio.high == pytest.approx(spread(ratios).high, abs=1e-5)
    assert speedup.round == 1 and speedup.before_s - speedup.after_s == pytest.approx(speedup.saved_s.median)
    assert sum(one.saved_s for one in speedup.causes) == pytest.approx(speedup.saved_s.median)
    seconds = {one.name: round(one.saved_s, 2) for one in speedup.causes}
    assert list(seconds.items())[:3] == [
        ("generation overlapped with training", world.GENERATION),
        ("scoring overlapped", world.REWARD),
        ("weight transfer overlapped", world.PUBLISH),
    ]


def test_the_law_and_the_simulation_of_emulated_devices_are_the_profiles_in_scaled_time(done):
    folder, overlap, _ = done
    profile = load_profile(str(folder / "toy.json"))
    for arm, planned in zip(overlap.arms, ARMS, strict=True):
        budget = int(planned.partition(":")[2] or 0)
        assert arm.config["staleness"]["max_updates"] == budget
        assert arm.prediction.simulated_s == pytest.approx(profile.generate.unit_s / 2 * 0.01)
        assert arm.prediction.law_s == pytest.approx(async_step(arm.prediction.times, budget))
    sync, found = overlap.arms[0].prediction, compare(overlap)["sync"]
    per_engine = world.GROUPS * world.SIZE / 2
    assert sync.times.generate == pytest.approx(per_engine * 0.1 * 0.01)
    assert found.bound_fraction == pytest.approx(sync.law_s / found.step_s.median)
    assert found.deviation == pytest.approx(sync.simulated_s / found.step_s.median - 1)


def real(tmp_path, train, arms):
    trainer = {"updates": 12, "groups_per_update": world.GROUPS}
    write_world(tmp_path, trainer=trainer, rollout={"workers": 2, "group_size": world.SIZE}, run={"seed": 7})
    return bench(tmp_path, train, arms=arms, recipe=tmp_path / "recipe.yaml")[0]


def test_real_devices_get_the_law_of_what_the_sync_arms_median_run_measured(tmp_path):
    overlap = real(tmp_path, world.FakeTrain(STEPS, profile=world.PROFILE), arms=("async:1", "sync"))
    assert overlap.law.startswith("service times measured in runs/sync-r")
    assert overlap.law.endswith(" (sync, the repeat with the median step)")
    assert overlap.time_scale == 1
    config = load(tmp_path / "recipe.yaml", ["schedule=async", "staleness.max_updates=1"])
    assert overlap.arms[0].prediction.law_s == pytest.approx(async_step(times_of(config, world.PROFILE), 1))
    assert overlap.arms[0].prediction.simulated_s == world.PROFILE.generate.unit_s / 2


def test_without_a_sync_arm_the_law_is_that_of_the_first_arm_and_without_a_profile_there_is_none(tmp_path):
    overlap = real(tmp_path / "a", world.FakeTrain(STEPS, profile=world.PROFILE), arms=("async:2", "async:1"))
    run = overlap.arms[0].runs[1].folder
    assert overlap.law == f"service times measured in {run} (async:2, the repeat with the median step)"
    overlap = real(tmp_path / "b", world.FakeTrain(), arms=("async:1", "sync"))
    assert overlap.law == "no run to take service times from"
    assert all(summary.law_s is None and summary.bound_fraction is None for summary in compare(overlap).values())


# ---- failures and interruptions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "reason"),
    [(("failed", "EngineError: gone"), "EngineError: gone"), (RuntimeError("no\nmemory"), "RuntimeError: no memory")],
)
def test_a_failed_run_is_reported_and_the_others_go_on(tmp_path, ending, reason):
    train = world.FakeTrain(STEPS, ends=at("async-1", 1, ending))
    overlap, said = bench(tmp_path, train)
    assert len(train.ran) == 9 and overlap.failed
    [failure] = overlap.arms[1].failures
    assert (failure.round, failure.reason, failure.measured) == (1, reason, None)
    assert compare(overlap)["async:1"].runs == 2
    assert compare(overlap)["async:1"].step_s.median == pytest.approx(8 + 1 / 64, abs=1e-5)
    assert f"async:1 round 2: FAILED: {reason}\n" in said


def test_a_run_that_says_done_but_left_too_little_is_a_failure_and_a_simulation_that_fails_a_reason(tmp_path):
    def train(inputs, console):
        return world.write_run(inputs, *world.sync_spans(11))[1]

    def broken(*given):
        raise RuntimeError("no such world")

    overlap, _ = bench(tmp_path, train, arms=["sync"], repeats=1, simulator=broken)
    [arm] = overlap.arms
    assert overlap.failed and "expected updates 1 to 12, found 11" in arm.failures[0].reason
    assert compare(overlap) == {}
    assert (arm.prediction.simulated_s, arm.prediction.not_simulated) == (None, "RuntimeError: no such world")


def at(arm, number, ending):
    """Ends one run otherwise than done."""
    return lambda *run: ending if run == (arm, number) else None


@pytest.mark.parametrize("ending", [("interrupted", "on request"), KeyboardInterrupt()])
def test_an_interrupted_benchmark_writes_what_is_done_and_the_same_command_goes_on_with_what_is_missing(
    tmp_path, ending
):
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, world.FakeTrain(STEPS, ends=at("async-2", 1, ending)))
    overlap = read_overlap(tmp_path / "out")
    assert [len(arm.measured) for arm in overlap.arms] == [1, 2, 1]
    assert not overlap.failed
    again = world.FakeTrain(STEPS)
    overlap, said = bench(tmp_path, again)
    assert again.ran == [("async-2", 1), ("sync", 1), ("async-2", 2), ("sync", 2), ("async-1", 2)]
    assert [len(arm.measured) for arm in overlap.arms] == [3, 3, 3]
    assert said.count("complete already") == 4
    assert overlap.arms[0].runs[0].load is None and overlap.arms[0].runs[1].load is not None


# ---- output and files ------------------------------------------------------------------------------------------------


def test_a_pipe_sees_the_plan_and_a_line_per_run(done):
    _, _, said = done
    first, *lines = said.splitlines()
    assert first == "simulating every arm, some seconds each"
    for line, arm, budget, held in ((lines[0], "sync   ", 0, 64), (lines[2], "async:2", 2, 96)):
        roles = f"S = {budget}, 2 engines, 1 reward workers, 1 ranks"
        assert line.startswith(f"{arm}         {roles}; buffer.groups 16, buffer.trajectories {held}, law ")
    assert lines[3].startswith("9 runs of up to 12 updates, interleaved in 3 rounds; ")
    assert len(lines) == 4 + 9
    assert lines[4].startswith("1/9 sync round 1: 14 s per update, in 0 s; elapsed 0:00:0")
    assert "left" in lines[4] and "left" not in lines[-1]


def test_everything_is_written_and_read_back(done):
    folder, overlap, _ = done
    assert read_overlap(folder / "out") == overlap == read_overlap(folder / "out" / "overlap.json")
    written = json.loads((folder / "out" / "overlap.json").read_text())
    assert [summary["name"] for summary in written["summary"]] == list(ARMS)
    assert written["machine"]["cpus"] >= 1 and written["machine"]["packages"]["ray"]
    assert written["arms"][0]["runs"][0]["measured"]["steps_s"] == pytest.approx([world.SYNC_STEP] * 10, abs=1e-5)
    assert written["answer"]["arm"] == "async:2" and written["answer"]["baseline"] == "sync"
    assert (folder / "out" / "overlap.md").read_text().startswith("**async:2 saves 9.0 s per update over sync: ")
    assert (folder / "out" / "overlap.png").stat().st_size > 10_000


def test_no_credential_of_the_recipe_or_the_command_is_in_what_is_written(tmp_path, monkeypatch):
    params = "{url: 'https://me:hunter2@h/?token=hunter2', api_key: hunter2}"
    override = f"reward.scorers=[{{name: no_such_scorer, params: {params}}}]"
    monkeypatch.setattr("sys.argv", ["omni-async", "bench", "overlap", "recipe.yaml", override])
    overlap, said = bench(tmp_path, world.FakeTrain(STEPS), override, arms=ARMS[:1], repeats=1)
    assert overlap.arms[0].config["reward"]["scorers"][0]["params"]["api_key"] == "***" and "***" in overlap.command
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == [] and "hunter2" not in said


# ---- real runs on emulated devices -----------------------------------------------------------------------------------


# Nothing varies, so that no run can be faster than the law says.
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


def run_really(folder: Path, *overrides: str, **options) -> Overlap:
    recipe = world.write_recipe(folder, emulation={"time_scale": 0.02})
    write_profile(folder / "toy.json", STEADY)
    return run_overlap(recipe, overrides, out=folder / "out", terminal=Console(file=io.StringIO()), **options)


def whole_run(folder: Path) -> dict[str, float]:
    """Returns the seconds of each category from a run's first job until its last update is finished.

    Emulated devices make up for an event loop that woke up late, so a few updates may take less than the law, a whole
    run never."""
    spans = [*read_trace(folder / "trace.json")]
    finished = [json.loads(line).get("finished", 0.0) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return attribute(spans, min(span.start for span in spans if span.kind == "generate"), max(finished), 2)


@pytest.mark.slow
def test_schedules_on_emulated_devices_of_one_process(tmp_path):
    arms = ["sync", "sync_colocated", "async_reward", "one_step_off", "async:1"]
    overlap = run_really(tmp_path, arms=arms, repeats=1, updates=9)
    assert [run.reason for arm in overlap.arms for run in arm.runs] == [None] * len(arms)
    found = compare(overlap)
    assert list(found) == arms
    whole = {arm.name: whole_run(tmp_path / "out" / arm.runs[0].folder) for arm in overlap.arms}
    for arm in found.values():
        assert sum(arm.attribution.values()) == pytest.approx(arm.step_s.median)
        # The last update publishes to nobody.
        assert sum(whole[arm.name].values()) > 0.99 * arm.law_s * 8
        assert arm.simulated_s > 0.99 * arm.law_s
        training = 0.02 * world.GROUPS * (world.SIZE * 0.25) / (4 if arm.name == "sync_colocated" else 1)
        assert whole[arm.name]["training"] > 0.99 * training * 9
        assert set(arm.busy) >= {"rollout", "reward", "trainer"}
        assert sum(arm.staleness.values()) == 9 * world.GROUPS
    assert [arm.staleness_max for arm in found.values()] == [0, 0, 0, 1, 1]
    # In step, reward workers wait for the last sample and the trainer for the last score.
    sync = whole["sync"]
    per_engine, samples = world.GROUPS * world.SIZE / 2, world.GROUPS * world.SIZE
    assert sync["generation"] + sync["tail"] > 0.99 * 0.02 * per_engine * 0.5 * 9
    assert sync["reward"] > 0.99 * 0.02 * samples * 0.25 * 9
    assert sync["switch"] == 0 < whole["sync_colocated"]["switch"]


@pytest.mark.thorough
@pytest.mark.slow
def test_all_runs_of_a_benchmark_share_one_ray(tmp_path):
    import ray

    overlap = run_really(tmp_path, "run.runtime=ray", arms=["async:0"], repeats=2, updates=6)
    assert [run.reason for arm in overlap.arms for run in arm.runs] == [None, None]
    assert not ray.is_initialized()
    for run in overlap.arms[0].runs:
        assert read_summary(tmp_path / "out" / run.folder / "summary.json").conserved
