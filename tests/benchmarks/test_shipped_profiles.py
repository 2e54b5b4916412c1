"""Tests that shipped profiles give back the published steps they are built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.profiles import PROFILES, shipped
from benchmarks.profiles_reproduced import RECIPES, REPRODUCED, Reproduced, law_s
from omni_async.config import Config, ConfigError, load
from omni_async.config.schedule import num_devices
from omni_async.performance.profile import Profile, ServiceTime, load_profile, shipped_profiles, write_profile
from omni_async.simulation.result import times_of
from omni_async.simulation.simulate import simulate
from omni_async.simulation.tune.keys import RANKS, REWARDERS, ranked_splits

NAMES = sorted(profile.name for profile in shipped())
SAMPLES = 512


def recipe(name: str, *overrides: str) -> Config:
    return load(RECIPES / f"{name}.yaml", overrides)


def test_the_shipped_files_are_what_the_builder_writes(tmp_path: Path) -> None:
    assert shipped_profiles() == NAMES
    for profile in shipped():
        write_profile(tmp_path / "profile.json", profile)
        assert (tmp_path / "profile.json").read_bytes() == (PROFILES / f"{profile.name}.json").read_bytes()


@pytest.mark.parametrize("arrangement", REPRODUCED, ids=lambda a: f"{a.profile}-{a.seconds:g}")
def test_the_law_gives_back_a_published_step(arrangement: Reproduced) -> None:
    assert law_s(arrangement) == pytest.approx(arrangement.seconds, rel=0.02)


def test_virtual_time_gives_back_the_published_step_of_gpus_that_take_turns() -> None:
    """Simulates 512 images one by one on 4 GPUs: no job is left over, so law and simulation agree."""
    name, overrides = REPRODUCED[0].profile, REPRODUCED[0].overrides
    simulated = simulate(recipe(name, *overrides), load_profile(name), updates=8)
    assert simulated.step_s == pytest.approx(420, rel=0.02)


def test_stages_take_what_is_published_of_them() -> None:
    generate = load_profile("qwen_image_lora_h800").generate  # one by one, and in batches
    assert [generate.mean(n) / n * SAMPLES / 4 for n in (1, 32)] == pytest.approx([226.4, 107.9], rel=1e-4)
    wan, per_npu = load_profile("wan22_dance"), SAMPLES / 8  # the log, split into its own stages
    assert wan.proximal.mean(per_npu) == pytest.approx(548.9, rel=1e-4)
    assert wan.train.mean(per_npu) + 4 * wan.step.mean() == pytest.approx(735.3, rel=1e-4)
    assert wan.export.mean() + wan.publish.mean() + wan.swap.mean() == pytest.approx(6.8, rel=1e-4)


def test_the_judge_takes_three_seconds_in_the_median_and_a_minute_once_in_a_hundred() -> None:
    score = load_profile("remote_judge").score
    seconds = sorted(score.fixed_s * factor for factor in score.quantiles)
    assert (seconds[24] + seconds[25]) / 2 == pytest.approx(3, rel=0.01)
    assert seconds[-1] == pytest.approx(60, rel=0.01)
    assert sum(score.quantiles) / len(score.quantiles) == pytest.approx(1, abs=1e-3)
    assert score.mean(8) == score.mean(1)  # other requests do not slow it down


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_deals_its_devices_as_the_law_likes_best(name: str) -> None:
    """Counts ranks that divide a group; reward workers on no device stay."""
    config, profile = recipe(name), load_profile(name)
    beside = {} if config.placement.reward.gpus else {REWARDERS: config.reward.workers}
    ranked = ranked_splits(config, profile, int(num_devices(config)), beside)
    best = next(split for split in ranked if not config.rollout.group_size % split.keys[RANKS])
    assert times_of(config, profile).bottleneck[1] <= best.step_s * 1.001


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_s_staleness_and_buffers_keep_the_bottleneck_busy(name: str) -> None:
    simulated = simulate(recipe(name), load_profile(name), updates=40)
    assert simulated.bound_fraction >= 0.95
    assert simulated.staleness_max == (4 if name == "qwen3_omni_thinker" else 2)


def test_a_profile_of_nothing_is_refused(tmp_path: Path) -> None:
    """Reads the profile that an attempt without an update would have measured."""
    nothing = ServiceTime()
    write_profile(
        tmp_path / "empty.json", Profile(name="x", source="made up", generate=nothing, score=nothing, train=nothing)
    )
    with pytest.raises(ConfigError, match=r"emulation\.profile: .*empty\.json: every stage takes 0 s"):
        load_profile(str(tmp_path / "empty.json"))
