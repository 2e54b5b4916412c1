"""Tests a run's numbers from the folder it left: each moment of the trainer in one category, and savings by cause."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.commands.bench.comparison import CATEGORIES, causes
from omni_async.commands.bench.measure import NotMeasurableError, attribute, measure, run_profile, steady_part
from omni_async.commands.bench.result import Measured
from omni_async.config import ConfigError, load
from omni_async.runtime.preflight.check import preflight
from omni_async.types import Span
from tests.commands.bench import overlap_world as world

SYNC = ("schedule=sync",)


def inputs(tmp_path, *overrides):
    recipe = world.write_recipe(tmp_path)
    return preflight(load(recipe, [f"run.dir={tmp_path / 'runs'}", *overrides]))


def test_a_synchronous_run_is_measured_exactly_and_roles_are_busy_or_wait_in_its_steady_part_alone(tmp_path):
    given = inputs(tmp_path, *SYNC)
    spans, finished = world.sync_spans(12)
    spans.append(Span("reward-0", "starved", world.ORIGIN - 500, finished[2]))
    run, _ = world.write_run(given, spans, finished, staleness=[0] * 48, memory=3 * 2**30, profile=world.PROFILE)
    found = measure(run.path, given.config)
    assert found.updates == 10
    assert found.step_s == pytest.approx(world.SYNC_STEP, abs=1e-5)
    assert found.steps_s == pytest.approx([world.SYNC_STEP] * 10, abs=1e-5)
    assert sum(found.attribution.values()) == pytest.approx(found.step_s, abs=1e-9)
    assert found.attribution["tail"] == pytest.approx(world.TAIL, abs=1e-5)
    assert found.images_per_s == pytest.approx(world.GROUPS * world.SIZE / world.SYNC_STEP, abs=1e-5)
    devices = 2 + 1 + 1  # engines, a reward worker, a trainer
    assert found.images_per_s_per_device == pytest.approx(found.images_per_s / devices)
    assert (found.staleness, found.peak_memory_bytes) == ({0: 48}, 3 * 2**30)
    generating, training = world.GENERATION + world.TAIL / 2, world.TRAINING + world.RECOMPUTE
    seconds = [generating, world.REWARD, training, world.EXPORT, world.PUBLISH]
    assert [*found.stages] == ["generation", "reward", "training", "export", "publish"]
    assert [stage.seconds for stage in found.stages.values()] == pytest.approx(seconds, abs=1e-5)
    waiting = world.GENERATION + world.TAIL + world.REWARD + world.CONTROL
    assert found.busy["rollout"]["busy"] == pytest.approx(generating / world.SYNC_STEP, abs=1e-4)
    assert found.busy["trainer"]["starved"] == pytest.approx(waiting / world.SYNC_STEP, abs=1e-4)
    assert found.busy["reward"]["starved"] == pytest.approx(0, abs=1e-4)


def test_the_variation_of_a_stage_is_the_profiles_and_unknown_without_one(tmp_path):
    given = inputs(tmp_path, *SYNC)
    run, _ = world.write_run(given, *world.sync_spans(12), profile=world.PROFILE)
    stages = measure(run.path, given.config).stages
    assert (stages["generation"].variation, stages["reward"].variation) == (0.1, 0.0)
    (run.path / "profile.json").write_text("{}")
    assert run_profile(run.path) is None
    assert measure(run.path, given.config).stages["generation"].variation is None


def test_tokens_per_second_are_those_of_the_answers_of_the_steady_part(tmp_path):
    given = inputs(tmp_path, *SYNC)
    spans, finished = world.sync_spans(12)
    lengths = {"g1.s0": [[0, 10]], "g1.s1": [[0, 20], [1, 30]], "v1.p0.s0": [[0, 999]]}
    inside = world.ORIGIN + 4 * world.SYNC_STEP
    for sample, versions in lengths.items():
        args = {"sample": sample, "version_steps": versions}
        spans.append(Span("rollout-0", "generate", inside - 1, inside, args))
    spans.append(Span("rollout-0", "generate", world.ORIGIN, world.ORIGIN + 1, {"version_steps": [[0, 999]]}))
    run, _ = world.write_run(given, [s for s in spans if s.kind != "generate" or "version_steps" in s.args], finished)
    assert measure(run.path, given.config).tokens_per_s is None
    answers = replace(given.config, rollout=replace(given.config.rollout, engine="vllm"))
    found = measure(run.path, answers)
    assert found.tokens_per_s == pytest.approx(30 * found.images_per_s)


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
        overrides = ("schedule=async", f"staleness.max_updates={budget}", f"trainer.updates={updates}")
        return steady_part(inputs(tmp_path, *overrides).config)

    period = budget + 1
    assert part(40) == (first, first + (40 - budget - first) // period * period)
    fewest = first + 4 + budget
    assert part(fewest)[0] == first < part(fewest)[1] <= fewest - budget
    with pytest.raises(ConfigError, match=rf"^trainer.updates: {fewest - 1} are too few.*at least --updates {fewest}$"):
        part(fewest - 1)


def test_what_is_missing_or_cut_off_is_an_error_and_no_number(tmp_path):
    given = inputs(tmp_path, *SYNC)
    short, _ = world.write_run(given, *world.sync_spans(11))
    with pytest.raises(NotMeasurableError, match="expected updates 1 to 12, found 11"):
        measure(short.path, given.config)
    for name in ("summary.json", "metrics.jsonl", "trace.json"):
        run, _ = world.write_run(given, *world.sync_spans(12))
        file = run.path / name
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(NotMeasurableError, match=str(run.path)):
            measure(run.path, given.config)
        file.unlink()
        with pytest.raises(NotMeasurableError, match=str(run.path)):
            measure(run.path, given.config)
    run, _ = world.write_run(given, *world.sync_spans(12))
    run.trace.write_text(json.dumps({"traceEvents": [{"ph": "X"}]}))
    with pytest.raises(NotMeasurableError, match="is no timeline that a run wrote"):
        measure(run.path, given.config)


# ---- where the seconds of a step go ----------------------------------------------------------------------------------

_ACTORS = st.sampled_from(["trainer", "rollout-0", "rollout-1", "rollout-2", "reward-0", "publisher"])
_WORK = ("train", "proximal", "export", "checkpoint", "generate", "score", "publish", "stage", "swap", "switch")
_KINDS = st.sampled_from([*_WORK, "starved", "backpressured"])
_SPAN = st.builds(
    lambda a, k, s, d: Span(a, k, float(s), float(s + d)), _ACTORS, _KINDS, st.integers(0, 40), st.integers(0, 20)
)


@given(st.lists(_SPAN, max_size=20), st.integers(0, 30), st.integers(1, 30), st.integers(1, 3))
def test_every_unit_of_time_belongs_to_the_first_category_that_holds_in_it(spans, start, seconds, engines):
    def under_way(*kinds: str, second: int, of: str = "") -> set[str]:
        return {s.actor for s in spans if s.kind in kinds and s.actor.startswith(of) and s.start <= second < s.end}

    expected = dict.fromkeys(CATEGORIES, 0)
    for second in range(start, start + seconds):
        generating = under_way("generate", second=second)
        tests = {
            "training": under_way("train", second=second, of="trainer"),
            "recompute": under_way("proximal", second=second, of="trainer"),
            "export": under_way("export", second=second, of="trainer"),
            "generation": len(generating) >= engines,  # one that never works makes all of it a tail
            "tail": generating,
            "switch": under_way("switch", second=second),
            "reward": under_way("score", second=second),
            "weights": under_way("publish", "stage", "swap", second=second),
            "idle": True,
        }
        expected[next(name for name, holds in tests.items() if holds)] += 1
    found = attribute(spans, start, start + seconds, engines)
    assert found == pytest.approx(expected) and list(found) == list(CATEGORIES)


def seconds(**given: float) -> dict[str, float]:
    return {**dict.fromkeys(CATEGORIES, 0.0), **given}


def run_of(**attributed: float) -> Measured:
    spent = seconds(**attributed)
    step = sum(spent.values())
    named = {"updates": 1, "step_s": step, "steps_s": (step,), "images_per_s": 1.0, "images_per_s_per_device": 1.0}
    shown = {"stages": {}, "busy": {}, "staleness": {}, "peak_memory_bytes": None}
    return Measured(**named, **shown, attribution=spent)


def test_causes_of_a_saving_sum_to_it_and_name_what_grew():
    before = run_of(training=4.0, generation=3.0, reward=2.0, weights=1.0)
    after = run_of(training=4.5, reward=0.5, idle=0.25)
    found = causes(before, after)
    assert {one.category: one.saved_s for one in found} == pytest.approx(
        seconds(training=-0.5, generation=3.0, reward=1.5, weights=1.0, idle=-0.25)
    )
    assert sum(one.saved_s for one in found) == pytest.approx(before.step_s - after.step_s)
    assert [one.name for one in found if one.saved_s > 0] == [
        "generation overlapped with training",
        "scoring overlapped",
        "weight transfer overlapped",
    ]
    assert [one.name for one in found if one.saved_s < 0] == ["idle, longer", "training, longer"]


def test_seconds_without_a_category_are_a_cause_of_their_own():
    before, after = run_of(training=4.0, generation=3.0), run_of(training=4.0)
    found = causes(replace(before, step_s=7.75), after)
    assert found[1].name == "not attributed: no role was active" and found[1].saved_s == pytest.approx(0.75)
    assert sum(one.saved_s for one in found) == pytest.approx(3.75)
