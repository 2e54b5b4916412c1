"""Tests tuning with the real simulator, from the recipe to the written file: the file does what is promised."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
import yaml
from msgspec.structs import replace

from omni_async.commands.command_line import require_writable
from omni_async.config import ConfigError, load
from omni_async.config.algorithm import Correction, Teacher
from omni_async.config.section import Resources
from omni_async.performance.profile import ServiceTime
from omni_async.simulation.simulate import simulate
from omni_async.simulation.tune.keys import ENGINES, RANKS, REWARDERS, SPLIT, SWAP, TUNED, S, keys_of
from omni_async.simulation.tune.plot import picture
from omni_async.simulation.tune.report import require_another_file, text, write_tuned
from omni_async.simulation.tune.tuning import IN_STEP, SMALLEST_BUDGET, tune
from tests.simulation.tune.tune_world import GPU, PROFILE, RECIPE, job, simulate_by_law

VARIED = replace(PROFILE, generate=ServiceTime(unit_s=1.0, cv=0.05), score=ServiceTime(unit_s=0.2, cv=0.1))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def by_law(config, devices=3, **more):
    return tune(config, more.pop("profile", PROFILE), devices, simulate_by_law, budget=100, **more)


def written(recipe, config, tuned, overrides=(), out="tuned.yaml"):
    """Writes the tuned recipe and loads it again."""
    path = recipe.parent.parent / out
    write_tuned(path, recipe, config, overrides, tuned)
    return load(path)


@pytest.mark.parametrize("profile", [PROFILE, VARIED], ids=["steady", "varied"])
def test_the_written_recipe_loads_makes_what_was_promised_and_says_only_what_was_chosen_and_why(recipe, profile):
    tuned, out = tune(load(recipe), profile, 6, simulate, budget=100), "elsewhere/tuned.yaml"
    config = written(recipe, load(recipe), tuned, out=out)
    assert keys_of(config, TUNED) == tuned.chosen.keys
    again = simulate(config, profile, updates=200)
    assert again.images_per_s == pytest.approx(tuned.chosen.images_per_s, rel=0.02)
    assert again.staleness_max <= tuned.chosen.keys[S]
    assert tuned.chosen.images_per_s > 1.5 * tuned.recipe.images_per_s  # the recipe is in step, on half the devices

    said = (recipe.parent.parent / out).read_text()
    tree = yaml.safe_load(said)
    assert tree.pop("extends") == "../recipes/recipe.yaml"
    assert {f"{section}.{key}" for section, keys in tree.items() for key in keys} == set(tuned.keys)
    comments = " ".join(line.strip("# ") for line in said.splitlines() if line.strip().startswith("#"))
    assert all(tuned.reasons[path] in comments for path in tuned.keys)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_recommended_is_never_slower_than_the_recipe(recipe, seed):
    def by_chance(config, profile, *, updates, seed, bundle):
        found = simulate_by_law(config, profile, updates=updates, seed=seed, bundle=bundle)
        luck = Random(f"{keys_of(config, TUNED)} {seed}").uniform(0.95, 1.05)
        return replace(found, images_per_s=found.images_per_s * luck)

    config = load(recipe, ["staleness.max_updates=4", "buffer.groups=20", "buffer.trajectories=256", "buffer.window=4"])
    tuned = tune(config, VARIED, 3, by_chance, budget=60, seed=seed)
    assert tuned.recipe_devices == 3
    assert tuned.chosen.images_per_s >= tuned.recipe.images_per_s


def test_cpus_fewer_than_the_roles_take_are_shared():
    config = job(placement={"rollout": Resources(), "trainer": Resources()})
    tuned = by_law(config, devices=2)
    assert (tuned.kind, tuned.shared, tuned.recipe_devices) == ("cpus", True, 2)
    assert keys_of(config, SPLIT).items() <= tuned.chosen.keys.items() and set(SPLIT).isdisjoint(tuned.keys)
    assert list(tuned.in_step) == ["sync"], "all roles on all devices, in turn, is what they are not"
    assert "2 cpus are fewer than the roles take together: they share them" in text(tuned)


def test_what_was_given_on_the_command_line_goes_into_the_file_but_for_what_was_chosen(recipe):
    overrides = ["trainer.groups_per_update=8", "staleness.max_updates=7", "reward.scorers.0.weight=2"]
    overrides += ["validation=null", "model.dtype=bfloat16", "buffer={groups: 96, trajectories: 512}", "run={name: x}"]
    config = load(recipe, overrides)
    found = written(recipe, config, tuned := by_law(config), overrides)
    assert (found.trainer.groups_per_update, found.reward.scorers[0].weight, found.model.dtype) == (8, 2.0, "bfloat16")
    assert found.run.name == "x" and keys_of(found, TUNED) == tuned.chosen.keys and tuned.keys[S] != 7


@pytest.mark.parametrize("schedule", ["sync", "sync_colocated", "async_reward", "one_step_off", "async"])
def test_whatever_the_recipes_schedule_the_written_one_overlaps(recipe, schedule):
    recipe.write_text(f"schedule: {schedule}\n" + RECIPE)
    tuned = by_law(load(recipe))
    found = written(recipe, load(recipe), tuned)
    assert found.schedule == "async"
    assert keys_of(found, TUNED) == tuned.chosen.keys
    assert ("schedule" in tuned.keys) == (schedule != "async")
    assert SWAP not in tuned.keys
    assert "schedule" in tuned.reasons or schedule == "async"


def test_a_job_without_scorers_has_devices_for_engines_and_ranks_alone():
    distilled = {"name": "distill", "teacher": Teacher(path="t"), "correction": Correction()}
    config = job(algorithm=distilled, reward={"scorers": ()}, placement={"reward": GPU})
    tuned = tune(config, PROFILE, 4, simulate, budget=SMALLEST_BUDGET)
    keys, found = tuned.chosen.keys, tuned.chosen.simulated
    assert keys[ENGINES] + keys[RANKS] == 4 and REWARDERS not in tuned.keys
    assert set(found.busy) == {"rollout", "trainer"} and tuned.times.score == 0 and found.devices == 4
    assert "reward worker" not in text(tuned)


def test_kept_keys_are_neither_changed_nor_written(recipe):
    config, kept = load(recipe), [RANKS, S, "buffer.groups"]
    tuned = by_law(config, devices=6, keep=kept)
    assert keys_of(config, kept).items() <= tuned.chosen.keys.items()
    assert {*kept}.isdisjoint(tuned.keys | tuned.reasons)
    assert keys_of(written(recipe, config, tuned), TUNED) == tuned.chosen.keys
    # A long publish interval that is kept gets the staleness it needs.
    config = load(recipe, ["weights.publish_every=8", "staleness.max_updates=9", "buffer.groups=64"])
    tuned = by_law(config, keep=["weights.publish_every"])
    assert tuned.chosen.keys["weights.publish_every"] == 8 and tuned.chosen.keys[S] >= 7


def test_every_chosen_key_has_a_reason_with_its_numbers():
    tuned = by_law(job(), profile=replace(PROFILE, publish=ServiceTime(fixed_s=20.0)))
    (wave, (_, slowest)), reason = (tuned.times.latency, tuned.times.bottleneck), tuned.reasons[S]
    assert tuned.keys[S] == 2
    assert f"{wave / slowest:.2f} times what generation takes per update ({wave:.3g} s / {slowest:.3g} s)" in reason
    loss = 1 - slowest / (wave / 2)  # with one update fewer a step is half the wave
    assert f"; 1 loses {100 * loss:.0f} %" in reason and re.search(r", 3 (changes nothing|gains 0\.\d %)", reason)
    tuned = by_law(job(), devices=6)
    assert all(tuned.reasons[path].startswith(f"{value}") for path, value in tuned.keys.items())
    assert "the nearest other split, 3 engines + 3 ranks, needs 10.8 s for generation" in tuned.reasons[ENGINES]
    assert "1 reward worker then takes 8 s per update, generation 8.1 s" in tuned.reasons[REWARDERS]


def test_the_report_compares_with_the_recipe_and_marks_one_row():
    tuned = by_law(job(), devices=3)
    lines = text(tuned).splitlines()
    assert sum(line.startswith("| * |") for line in lines) == 1
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert [row[4] for row in rows if row[0] == "tuned"] == ["1.00 x"]
    assert [row[1] for row in rows if row[0] == "recipe as it is"] == ["3"]
    more = by_law(job(), devices=6)  # compared per device
    assert f"{more.chosen.images_per_s / 6 / (more.recipe.images_per_s / 3):.2f} x" in text(more)
    assert "--budget 24 looks closer" in text(tune(job(), PROFILE, 6, simulate_by_law, budget=12))
    assert "--budget" not in text(more)


def test_the_schedules_without_overlap_are_shown_unless_the_schema_refuses_them_also_where_they_would_be_faster():
    tuned = by_law(job(), devices=6)
    assert {name: point.simulated.staleness_max for name, point in tuned.in_step.items()} == dict.fromkeys(IN_STEP, 0)
    colocated = tuned.in_step["sync_colocated"].keys
    assert (colocated[ENGINES], colocated[RANKS]) == (6, 6)
    one_rank = by_law(job(run={"runtime": "inprocess"}, rollout={"engine": "diffusers"}), devices=3)
    assert one_rank.in_step.keys() == {"sync"}
    slow_hand_overs = replace(PROFILE, switch=ServiceTime(fixed_s=10.0))
    uneven = replace(PROFILE, score=ServiceTime(unit_s=0.01), train=ServiceTime(unit_s=0.1))
    assert "schedule: sync_colocated makes more of these devices" in text(by_law(job(), devices=2, profile=uneven))
    assert "makes more of these devices" not in text(by_law(job(), devices=2, profile=slow_hand_overs))


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        (
            replace(job(), data=replace(job().data, preferences="pairs.parquet")),
            {},
            "data.preferences: nothing is generated",
        ),
        (job(), {"devices": 1}, "--devices: 1 gpus are fewer"),
        (job(trainer={"workers": 3, "shard": 2}), {"devices": 5}, r"trainer\.shard: 2 ranks share a copy"),
        (job(algorithm={"name": "ppo"}), {}, r"algorithm\.name: expected one of"),
        (job(rollout={"sde": None}), {}, r"rollout\.sde: flow_grpo trains denoising steps"),
        (job(trainer={"streaming": "on", "steps_per_update": 2}), {}, "trainer.streaming: 'on' cannot be had here"),
        (job(), {"profile": PROFILE.scaled(0)}, "--profile: nothing takes any time in profile 'steady'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(config, arguments, said):
    with pytest.raises(ConfigError, match=said):
        by_law(config, **arguments)


def test_every_budget_is_searched_with_the_automatic_correction_where_training_has_to_stream():
    slow = replace(PROFILE, publish=ServiceTime(fixed_s=120.0))
    automatic = job(algorithm={"correction": Correction()}, trainer={"streaming": "on"})
    assert max(point.keys[S] for point in by_law(automatic, profile=slow).points) > 4


@pytest.mark.parametrize(("devices", "recipe"), [(3, ["recipe as it is"]), (6, [])])
def test_the_figure_shows_the_front_the_choice_and_the_recipe_on_as_many_devices(devices, recipe):
    axes = picture(by_law(job(), devices=devices)).axes[0]
    shown = [entry.get_text() for entry in axes.get_legend().get_texts()]
    assert shown == ["simulated", "front", "recommended", *recipe]


def test_a_file_that_cannot_be_written_is_one_line_and_one_that_is_there_stays(tmp_path):
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken" / "tuned.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"--out: cannot write .*(taken|xxx)"):
            require_writable("--out", path)
    (tmp_path / "link").symlink_to("elsewhere")
    for path in (None, *(tmp_path / name for name in ("taken", "new", "folder/new", "link"))):
        require_writable("--out", path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["taken"]


def test_the_recipe_itself_is_never_overwritten(recipe):
    with pytest.raises(ConfigError, match=r"--out: .* is the recipe itself"):
        require_another_file(recipe.parent / ".." / "recipes" / "recipe.yaml", recipe)
    assert recipe.read_text() == RECIPE
