"""Tests which arms a benchmark runs, with which configuration, and in which order."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from omni_async.commands.bench.measure import steady_part
from omni_async.commands.bench.plan import BASELINES, DEFAULT_ARMS, Arm, finished_run, make_plan, parse_arms
from omni_async.config import ConfigError
from omni_async.config.schedule import SCHEDULES
from omni_async.roles.plan import plan_updates
from tests.commands.bench import overlap_world as world


def plan(tmp_path, *overrides, arms=DEFAULT_ARMS, updates=24, steps=None, repeats=3, **recipe):
    path, given = world.write_recipe(tmp_path, **recipe), {"repeats": repeats, "updates": updates, "steps": steps}
    return make_plan(path, overrides, parse_arms(arms), out=tmp_path / "out", **given)


# ---- arms ------------------------------------------------------------------------------------------------------------


def test_the_default_arms_are_all_schedules_with_five_staleness_budgets_and_one_given_twice_is_one_arm():
    arms = parse_arms(DEFAULT_ARMS)
    assert [arm.name for arm in arms] == list(DEFAULT_ARMS)
    assert {arm.schedule for arm in arms} == set(SCHEDULES) == {*BASELINES, "async"}
    assert [arm.max_updates for arm in arms if arm.schedule == "async"] == [0, 1, 2, 4, 8]
    assert parse_arms(("async:2", " sync", "async:2")) == (Arm("async", 2), Arm("sync", 0))


@pytest.mark.parametrize(
    "name", ["", "async", "async:", "async:-1", "async:x", "sync:1", "fast", "async:1001", "one-step-off"]
)
def test_what_is_no_arm_is_refused_with_what_would_be_one(name):
    with pytest.raises(ConfigError, match=rf"^--arms: '{name}' is no arm; expected sync, .* or async:S"):
        parse_arms(["sync", name])


def test_every_arm_has_its_schedules_keys_the_same_work_and_room_for_all_that_it_may_admit(tmp_path):
    planned = plan(tmp_path, "buffer.groups=5", "buffer.trajectories=40")
    assert not [p.skipped for p in planned.arms if p.skipped]
    for p in planned.arms:
        config, groups = p.config, (p.arm.max_updates + 1) * world.GROUPS
        assert (config.schedule, config.staleness.max_updates) == (p.arm.schedule, p.arm.max_updates)
        assert config.reward.streaming == (p.arm.schedule not in ("sync", "sync_colocated"))
        work = (config.trainer.updates, config.trainer.groups_per_update, config.rollout.group_size)
        assert work == (24, world.GROUPS, world.SIZE)
        assert (config.buffer.groups, config.buffer.trajectories) == (max(5, groups), max(40, groups * world.SIZE))
        assert config.validation is None and not config.tracking.mlflow.enabled
    assert {p.arm.name for p in planned.arms if p.config.placement.colocated} == {"sync_colocated"}


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("schedule=sync", "use --arms"),
        ("staleness.max_updates=2", "use --arms async:S"),
        ("staleness={max_updates: 2}", "use --arms async:S"),
        ("trainer.updates=9", "use --updates"),
        ("run.dir=elsewhere", "use --out"),
        ("trainer.streaming=off", "every schedule decides it"),
    ],
)
def test_what_the_benchmark_decides_cannot_be_overridden(tmp_path, override, instead):
    with pytest.raises(ConfigError, match=instead):
        plan(tmp_path, override)


def test_an_arm_that_the_recipe_rules_out_is_skipped_with_the_reason_and_no_arm_at_all_is_an_error(tmp_path):
    found = plan(tmp_path, "weights.publish_every=2", arms=["sync", "async:0", "async:1"])
    reasons = {p.arm.name: p.skipped for p in found.arms}
    assert reasons["async:1"] is None
    assert reasons["sync"].startswith("weights.publish_every: schedule 'sync' sets it to 1, got 2")
    assert reasons["async:0"].startswith("staleness.max_updates: 0 is smaller than weights.publish_every - 1 = 1")
    assert {job.arm.name for job in found.jobs()} == {"async:1"}
    with pytest.raises(ConfigError, match=r"^no arm can be run; async:0: staleness.max_updates: 0 is smaller"):
        plan(tmp_path, "weights.publish_every=2", arms=["async:0"])


def test_too_few_updates_for_the_largest_budget_are_refused_before_anything_runs(tmp_path):
    assert plan(tmp_path, updates=22).base.trainer.updates == 22
    with pytest.raises(ConfigError, match=r"^trainer.updates: 21 are too few: with a staleness budget of 8"):
        plan(tmp_path, updates=21)


@pytest.mark.parametrize(("arms", "updates"), [(["sync"], 12), (["async:1"], 12), (["sync", "async:8"], 10 + 9 + 8)])
def test_updates_default_to_the_recipes_unless_an_arm_needs_more(tmp_path, arms, updates):
    found = plan(tmp_path, updates=None, arms=arms)
    assert {job.config.trainer.updates for job in found.jobs()} == {found.base.trainer.updates} == {updates}


def test_with_steps_every_arm_runs_as_long_as_it_takes_to_measure_them(tmp_path):
    planned = plan(tmp_path, updates=None, steps=6)
    for p in planned.arms:
        first, last = steady_part(p.config)
        assert 6 <= last - first < 6 + p.arm.max_updates + 1
        assert (last - first) % (p.arm.max_updates + 1) == 0
    assert planned.base.trainer.updates == max(p.config.trainer.updates for p in planned.arms)
    (in_step,) = plan(tmp_path, updates=None, steps=6, arms=["sync"]).arms
    assert in_step.config.trainer.updates == 2 + 6


def test_an_objective_that_corrects_nothing_has_nothing_to_share(tmp_path):
    assert not [p.skipped for p in plan(tmp_path, "algorithm.name=diffusion_nft", "rollout.sde=null").arms if p.skipped]


@pytest.mark.parametrize(("given", "mode"), [((), "bypass"), (("algorithm.correction.mode=decoupled",), "decoupled")])
def test_every_arm_corrects_in_the_same_way(tmp_path, given, mode):
    found = plan(tmp_path, *given)
    assert {p.config.correction.mode for p in found.arms} == {mode}
    assert len({plan_updates(p.config).proximal for p in found.arms}) == 1


def test_a_wrong_override_or_a_job_that_generates_nothing_is_the_recipes_error_and_no_skipped_arm(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout.workers: expected int >= 1, got 0"):
        plan(tmp_path, "rollout.workers=0")
    (tmp_path / "pairs.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data.preferences"):
        plan(tmp_path, emulation=None, data={"preferences": "pairs.parquet"})


# ---- order -----------------------------------------------------------------------------------------------------------


def test_every_round_runs_every_arm_once_and_starts_with_another(tmp_path):
    names = ["sync", "async_reward", "async:1"]
    jobs = [(job.round, job.arm.name) for job in plan(tmp_path, arms=names, repeats=4).jobs()]
    rotated = [names, [*names[1:], names[0]], [*names[2:], *names[:2]], names]
    assert jobs == [(number, name) for number, order in enumerate(rotated) for name in order]


def test_the_arms_of_a_round_share_its_seed_and_no_two_runs_share_a_folder(tmp_path):
    jobs = list(plan(tmp_path).jobs())
    assert all(job.config.run.seed == 7 + job.round for job in jobs)
    folders = {job.config.run.dir for job in jobs}
    assert len(folders) == len(jobs) and str(tmp_path / "out" / "runs" / "async-2-r1") in folders


# ---- what is complete ------------------------------------------------------------------------------------------------


def job_of(tmp_path, *overrides):
    [job] = plan(tmp_path, *overrides, arms=["sync"], repeats=1).jobs()
    return job


def test_a_run_is_complete_if_it_is_done_with_these_settings_this_code_and_this_profile(tmp_path, monkeypatch):
    job, other = job_of(tmp_path), job_of(tmp_path, "reward.batch=3")
    for inputs, status in ((job.inputs, "failed"), (job.inputs, "interrupted"), (other.inputs, "done")):
        world.write_run(inputs, *world.sync_spans(24), status=status)
    assert finished_run(job.inputs) is None
    runs = [world.write_run(job.inputs, *world.sync_spans(24))[0].path for _ in range(2)]
    assert finished_run(job.inputs) in runs
    slower = replace(job.inputs, profile=msgspec.structs.replace(job.inputs.profile, name="measured again"))
    assert finished_run(slower) is None
    monkeypatch.setattr("omni_async.commands.bench.plan._code", lambda: "mended")
    assert finished_run(job.inputs) is None


@pytest.mark.parametrize("name", ["summary.json", "trace.json", "config.yaml", "fingerprint"])
def test_a_run_that_was_cut_off_is_not_complete(tmp_path, name):
    job = job_of(tmp_path)
    run, _ = world.write_run(job.inputs, *world.sync_spans(24))
    (run.path / name).unlink()
    assert finished_run(job.inputs) is None
