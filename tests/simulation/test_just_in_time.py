"""Tests admission just in time on the real coordinator in virtual time: young groups at full speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from omni_async.config import Config, load
from omni_async.performance.profile import Profile, load_profile
from omni_async.simulation.result import Simulated
from omni_async.simulation.simulate import simulate
from omni_async.simulation.sweep import with_budget
from tests.simulation.simulation_world import make_config, make_profile

EMULATED = Path(__file__).parents[2] / "recipes" / "emulated"
PROFILES = ("qwen_image_full_h200", "qwen_image_full_h100_64", "wan22_dance", "remote_judge", "qwen_image_lora_h800")


def simulated(config: Config, profile: Profile, updates: int, reserve: str) -> Simulated:
    return simulate(replace(config, staleness=replace(config.staleness, reserve=reserve)), profile, updates=updates)


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("name", PROFILES)
def test_a_budget_of_8_costs_no_more_than_the_least_that_feeds_the_trainer(name: str) -> None:
    """Groups are at most 1.3 times as old as with the least budget of a run that admits into every slot."""
    config = load(EMULATED / f"{name}.yaml")
    assert config.emulation is not None
    profile = load_profile(config.emulation.profile)
    slots = (simulated(with_budget(config, budget), profile, 60, "all") for budget in (1, 2))
    least = next(result for result in slots if result.bound_fraction >= 0.97)
    every = simulated(with_budget(config, 8), profile, 60, "all")
    timely = simulated(with_budget(config, 8), profile, 60, "auto")
    assert timely.staleness_mean <= 1.3 * least.staleness_mean
    assert every.step_s / timely.step_s >= 0.99


@pytest.mark.parametrize("share", [0.5, 0.9, 1.2])
def test_a_queue_at_the_reward_workers_makes_no_group_older(share: float) -> None:
    """Scoring takes this share of the trainer's time; above 1 it is the slowest stage."""
    budget = {"staleness__max_updates": 8, "trainer__groups_per_update": 4, "rollout__group_size": 4}
    engines = {"rollout__workers": 4, "rollout__max_inflight": 2, "rollout__max_batch": 1}
    config = make_config(**budget, **engines, trainer__streaming="auto", weights__swap="step")
    times = {"train": (0, 1 / 16, 0.1), "generate": (0, 0.3 * 4 / 16, 0.1), "publish": (0.1,)}
    profile = make_profile(**times, score=(0, share * 4 / 3 / 16, 0.1))
    every, timely = (simulated(config, profile, 60, reserve) for reserve in ("all", "auto"))
    assert every.staleness_mean > 7 and timely.staleness_mean < 2.5
    assert every.step_s / timely.step_s >= 0.99


def test_the_queue_of_the_first_groups_is_forgotten() -> None:
    """All engines together are busy for 85 % of the time, and three updates' groups are admitted at once."""
    config = make_config(staleness__max_updates=8, trainer__groups_per_update=4, rollout__group_size=4)
    profile = make_profile(train=(0, 1 / 16), generate=(0, 0.85 / 16), score=(0, 0.05 / 16))
    assert simulated(config, profile, 24, "auto").staleness_mean < 1.6
