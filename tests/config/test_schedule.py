"""Tests schedules as arrangements of ordinary keys: the keys each sets and leaves alone, and contradictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.config import Config, ConfigError, load, resolved_yaml
from omni_async.config.schedule import SCHEDULES, apply_schedule, num_devices

RECIPE = """
model: {path: model}
data: {prompts: prompts.txt}
rollout: {workers: 2, group_size: 8}
reward: {scorers: [{name: ocr}]}
staleness: {max_updates: 3}
buffer: {trajectories: 10, groups: 5}
weights: {publish_every: 2, swap: request}
trainer: {groups_per_update: 4, streaming: "off"}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def at(config: Config, path: str) -> object:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_sets_its_keys(recipe, schedule, tmp_path):
    config = load(recipe, [f"schedule={schedule}"])
    assert {path: at(config, path) for path in SCHEDULES[schedule]} == SCHEDULES[schedule]
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert load(tmp_path / "resolved.yaml") == apply_schedule(config) == config


def test_recipe_and_command_line(recipe):
    """Lets the command line name another schedule, which it must not contradict; async leaves the budget alone."""
    assert load(recipe, ["schedule=async", "staleness.max_updates=8"]).staleness.max_updates == 8
    recipe.write_text("schedule: async\n" + RECIPE)
    assert load(recipe).reward.streaming and load(recipe).staleness.max_updates == 3
    assert not load(recipe, ["schedule=sync", "staleness.max_updates=0"]).reward.streaming
    with pytest.raises(
        ConfigError, match=r"staleness.max_updates: schedule 'sync' sets it to 0, got 2; leave one of them out"
    ):
        load(recipe, ["schedule=sync", "staleness.max_updates=2"])


def test_buffers_hold_whole_updates(recipe):
    assert load(recipe, ["schedule=sync"]).buffer.trajectories == 32
    assert load(recipe, ["schedule=one_step_off"]).buffer.groups == 8
    for override, said in (
        ("reward.streaming=false", r"buffer.trajectories: with reward.streaming: false .* 32 samples .* once, got 10"),
        ("placement.colocated=true", r"placement.colocated: .* staleness.max_updates: 0, got 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(recipe, [override])


def test_colocated_roles(recipe):
    config = load(recipe, ["schedule=sync_colocated"])
    assert (config.rollout.workers, config.reward.workers, config.trainer.workers) == (4, 4, 4)
    assert num_devices(config) == num_devices(load(recipe)) == 4
    gpus = ["placement.rollout.gpus=2", "placement.trainer.gpus=1", "trainer.workers=4"]
    separate = load(recipe, gpus)
    assert num_devices(separate) == 8, "two engines of two GPUs, four ranks, and a reward worker that uses none"
    config = load(recipe, [*gpus, "schedule=sync_colocated"])
    assert (config.rollout.workers, config.reward.workers, config.trainer.workers) == (4, 1, 8)
    assert num_devices(config) == 8
    services = ["reward.pools=[{name: a, workers: 3, resources: {gpus: 1}}]", "reward.scorers=[{name: ocr, pool: a}]"]
    config = load(recipe, [*gpus, *services, "schedule=sync_colocated"])
    assert (config.rollout.workers, config.trainer.workers, config.reward.pools[0].workers) == (4, 8, 3)
    assert num_devices(config) == 8 + 3, "pools have devices of their own"


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ([], 7),
        (["trainer.sequence_parallel=2"], 6),
        (["trainer.shard=2", "trainer.sequence_parallel=3"], 6),
        (["trainer.shard=8"], 7),  # which the trainer refuses, as it does without the schedule
    ],
)
def test_colocated_ranks_make_whole_groups(recipe, degrees, ranks):
    config = load(recipe, ["rollout.workers=5", "schedule=sync_colocated", *degrees])
    assert (config.rollout.workers, config.trainer.workers, num_devices(config)) == (7, ranks, 7)


def test_emulated_jobs_need_no_prompts(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {path: none}\ndata: {}\nemulation: {profile: profile.json}\n")
    config = load(tmp_path / "recipe.yaml")
    assert config.emulation is not None
    assert config.emulation.profile == str((tmp_path / "profile.json").resolve())
    assert load(tmp_path / "recipe.yaml", ["emulation.profile=shipped"]).emulation.profile == "shipped"
