"""Tests the price of an outage: what the reserve of groups covers costs the trainer nothing."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, NamedTuple

import pytest

from omni_async.config import Config
from omni_async.performance.profile import Profile
from omni_async.simulation.result import Simulated
from omni_async.simulation.simulate import simulate
from omni_async.simulation.world import Outage
from tests.simulation.simulation_world import make_config, make_profile

P, N, UPDATES = 4, 4, 36  # groups per update, samples per group
TRAIN_S = 1.0  # per group


class Case(NamedTuple):
    config: Config
    profile: Profile
    stage: Literal["generate", "score"]
    begins: float  # in updates
    lasts: float  # in updates


def drawn(seed: int, busy: tuple[float, float], reserves: list[Any]) -> Case:
    """Draws a job whose engines are busy for that share of the time that training takes."""
    dice = Random(seed)
    engines, batch, variation = dice.choice([1, 2, 4]), dice.choice([1, 4]), dice.choice([0.0, 0.0, 0.1, 0.3])
    sample_s = dice.uniform(*busy) * P * TRAIN_S * engines / (P * N)
    fixed = dice.choice([0.0, 0.5])
    config = make_config(
        rollout__workers=engines,
        rollout__group_size=N,
        rollout__max_batch=batch,
        rollout__max_inflight=dice.choice([batch, 2 * batch]),
        reward__workers=2,
        reward__batch=dice.choice([1, 4]),
        trainer__groups_per_update=P,
        trainer__streaming=dice.choice(["auto", "off"]),
        trainer__updates=UPDATES,
        staleness__max_updates=8,
        staleness__reserve=dice.choice(reserves),
        weights__publish_every=dice.choice([1, 1, 2]),
        algorithm__correction__mode="bypass",
    )
    profile = make_profile(
        generate=(sample_s * fixed * batch, sample_s * (1 - fixed), variation),
        score=(0.0, dice.uniform(0.1, 0.7) * 2 * TRAIN_S / N, variation),
        train=(TRAIN_S, 0.0, variation / 2),
        step=0.05,
        publish=dice.uniform(0, 0.3),
        swap=0.01,
    )
    return Case(config, profile, dice.choice(["generate", "score"]), dice.uniform(16, 20), dice.uniform(0.2, 5))


def played(case: Case, seed: int) -> tuple[Simulated, float, float]:
    """Returns the run without the outage, the outage's seconds, and how much later the run ends with it."""
    usual = simulate(case.config, case.profile, updates=UPDATES, seed=seed)
    outage = Outage(case.stage, case.begins * usual.step_s, case.lasts * usual.step_s)
    disturbed = simulate(case.config, case.profile, updates=UPDATES, seed=seed, outage=outage)
    return usual, outage.seconds, disturbed.virtual_s - usual.virtual_s


@pytest.mark.sliced(floor=6)
@pytest.mark.parametrize("seed", range(60))
def test_an_outage_costs_what_the_reserve_does_not_cover_and_an_update(seed: int) -> None:
    """Training is the slowest stage, so the reserve exists: engines had the time to make it."""
    case = drawn(seed, (0.2, 0.8), ["auto", "auto", 0, P // 2, P, 2 * P, 3 * P])
    usual, seconds, lost = played(case, seed)
    reserve = case.config.staleness.reserve
    covered = reserve * TRAIN_S if isinstance(reserve, int) else usual.reserve_s
    assert lost <= max(0.0, seconds - covered) + usual.step_s


@pytest.mark.sliced(floor=3)
@pytest.mark.parametrize("seed", range(20))
def test_an_outage_costs_its_own_time_and_an_update_where_the_trainer_waits_anyway(seed: int) -> None:
    case = drawn(1000 + seed, (0.8, 1.5), ["auto", 0, 3 * P, "all"])
    usual, seconds, lost = played(case, seed)
    assert lost <= seconds + usual.step_s


def test_a_longer_reserve_covers_a_longer_outage() -> None:
    """The engines are away for 2 updates: the reserve's groups are trained meanwhile, and the rest is lost."""
    lost = []
    for reserve in (0, P // 2, P, 2 * P, 3 * P):
        case = drawn(0, (0.4, 0.4), [reserve])
        config = make_config(
            rollout__group_size=N,
            trainer__groups_per_update=P,
            staleness={"max_updates": 8, "reserve": reserve},
            algorithm__correction__mode="bypass",
        )
        steady = case._replace(config=config, profile=make_profile(generate=0.2, train=TRAIN_S), stage="generate")
        usual, _, seconds = played(steady._replace(begins=18, lasts=2), 0)
        lost.append(seconds / usual.step_s)
    assert lost == pytest.approx([2.0, 1.5, 1.0, 0.0, 0.0], abs=0.25)


def test_a_job_is_longer_by_the_part_of_an_outage_that_it_meets() -> None:
    outage = Outage("generate", 10.0, 5.0)
    found = [outage.takes(now, 4.0) for now in (5.0, 6.0, 8.0, 10.0, 12.0, 15.0)]
    assert found == [4.0, 4.0, 9.0, 9.0, 7.0, 4.0]
