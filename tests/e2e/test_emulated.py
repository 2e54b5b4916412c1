"""Tests emulated devices under the real roles: they reproduce their profile, and leave what real runs leave."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import load
from omni_async.performance.measure import measure
from omni_async.performance.profile import NOTHING, load_profile
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write import timeline
from omni_async.records.write.activity import WAITS
from omni_async.records.write.summary import read_summary
from omni_async.runtime.driver import results
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation.result import times_of
from omni_async.worker import Worker
from tests.runtime.runtime_world import RememberingConsole
from tests.support.job_world import ENVIRONMENT, PROFILE, command_line, emulate, write_emulated


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_emulated(tmp_path)


# ---- in virtual time (that steps take what the simulator and the law say: tests/simulation) --------------------------


@pytest.mark.parametrize("collected", [False, True])
def test_recomputed_log_probs(recipe, collected) -> None:
    uncorrected = ["algorithm.correction.mode=none"] if collected else []
    steps = ("schedule=sync", "trainer.updates=3", "trainer.steps_per_update=2", "trainer.workers=2")
    run = emulate(recipe, *steps, *uncorrected)
    assert sum(span.kind == "proximal" for span in run.spans) == (3 * 8 if collected else 0)
    assert run.steps(1, 3) == pytest.approx([times_of(run.config, PROFILE).total] * 2, rel=1e-3)
    assert {span.actor for span in run.spans if Worker.parse(span.actor).role == "trainer"} == {"trainer"}


def test_runs_repeat_and_mix_versions(recipe: Path) -> None:
    """Compares two runs: the same rewards and steps, groups with a signal, and samples with steps of two versions."""
    jobs = ("schedule=async", "staleness.max_updates=2")
    first, second = (emulate(recipe, *jobs) for _ in range(2))
    assert first.ended["conservation"]["rejected"] == 0
    assert [update["reward"] for update in first.updates] == [update["reward"] for update in second.updates]
    assert first.steps(1, 3) == second.steps(1, 3)
    mixed = [span for span in first.spans if span.kind == "generate" and ".." in span.args["versions"]]
    assert mixed and {Worker.parse(span.actor).role for span in mixed} == {"rollout"}


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
def test_all_time_is_accounted_for(recipe: Path, schedule: str) -> None:
    run = emulate(recipe, f"schedule={schedule}")
    start, end = run.updates[2]["finished"], run.updates[8]["finished"]
    for actor in ("trainer", "reward-0"):
        times = timeline.union((span.start, span.end) for span in run.spans if span.actor == actor)
        assert timeline.length(timeline.clip(times, start, end)) == pytest.approx(end - start), actor


# ---- profiles of runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "sync_colocated", "async_reward", "one_step_off", "async"])
def test_measured_profiles_are_the_replayed_ones(recipe: Path, schedule: str) -> None:
    varied = {stage: replace(PROFILE.stages()[stage], cv=0.1) for stage in ("generate", "score", "train")}
    profile = replace(PROFILE, **varied)
    write_emulated(recipe.parent, profile)
    recomputed = ("algorithm.correction.mode=none", "trainer.steps_per_update=2")
    run = emulate(recipe, f"schedule={schedule}", "trainer.updates=20", *recomputed)
    config, per_rank = run.config, samples_per_rank(run.config)
    found = measure(run.spans, config, samples_per_rank=per_rank, name="found", source="a test")
    at_once = {"generate": config.rollout.max_batch, "score": config.reward.batch}
    for stage, units in (at_once | dict.fromkeys(("train", "proximal"), per_rank)).items():
        assert getattr(found, stage).mean(units) == pytest.approx(getattr(profile, stage).mean(units), rel=0.05), stage
    for stage in ("step", "export", "publish", "swap"):
        assert getattr(found, stage).mean() == pytest.approx(getattr(profile, stage).mean(), rel=0.02, abs=0.02), stage
    expected = profile.switch if config.placement.colocated else NOTHING
    assert found.switch.mean() == pytest.approx(expected.mean(), rel=0.02)
    assert found.payload == profile.payload


def test_a_profile_is_of_the_newest_spans_and_says_so(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_MEASURED", 100)
    inputs = preflight(load(recipe, ["emulation.time_scale=0.001", "trainer.updates=4"]))
    summary = train(inputs, RememberingConsole())
    profile = load_profile(str(recipe.parent / "runs" / summary.run / "profile.json"))
    assert ", its newest 100 of " in profile.source and profile.train.mean(4) > 0


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["inprocess", pytest.param("ray", marks=[pytest.mark.thorough, pytest.mark.slow])])
def test_emulated_runs_need_no_torch(recipe: Path, tmp_path: Path, runtime: str) -> None:
    seen, spy = tmp_path / "torch-was-imported", tmp_path / "path" / "torch"
    spy.mkdir(parents=True)
    (spy / "__init__.py").write_text(f"open({str(seen)!r}, 'a').close()\nraise ImportError('no torch here')\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{spy.parent}:{ENVIRONMENT['PYTHONPATH']}"}
    scale = 0.02 if runtime == "inprocess" else 0.1  # a job may begin some milliseconds late, which shortens it
    overrides = (f"run.runtime={runtime}", "schedule=async", f"emulation.time_scale={scale}", "trainer.updates=5")
    answer = command_line(recipe, *overrides, timeout=240, environment=environment)
    assert answer.code == 0, answer
    said = f"emulated: every device replays profile small at {scale} times its seconds; model, prompts, scorers and"
    assert f"{said} validation are ignored" in answer.stdout
    (run,) = (recipe.parent / "runs").glob("emulated-*")
    summary = read_summary(run / "summary.json")
    assert (summary.status, summary.updates, summary.conserved) == ("done", 5, True)
    spans = [*read_trace(run / "trace.json")]
    assert {Worker.parse(span.actor).role for span in spans} == {"rollout", "reward", "trainer", "publisher"}
    assert {span.kind for span in spans} >= {"generate", "score", "train", "export", "publish", "stage", "swap", *WAITS}
    finished = [json.loads(line)["finished"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [span.end for span in spans if span.kind == "train" and span.args.get("step") == 0]
    on_one_clock = [a <= b < c for a, b, c in zip(ends, finished, [*ends[1:], math.inf], strict=True)]
    assert on_one_clock == [True] * 5, "each update is finished after its step, and before the next one's"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-000005"]
    assert not list((run / "samples").iterdir())
    profile = load_profile(str(run / "profile.json"))
    assert profile.payload == PROFILE.payload
    assert profile.train.mean(4) >= 0.9 * scale * PROFILE.train.mean(4)
    assert not seen.exists()
