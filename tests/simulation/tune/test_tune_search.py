"""Tests the search, with a simulator that follows the law: what it recommends, how plain that is, and what it may
cost."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.config.checks import check
from omni_async.performance.law import smallest_useful_budget
from omni_async.performance.profile import ServiceTime
from omni_async.simulation.tune import keys as key
from omni_async.simulation.tune.keys import (
    fewest_trajectories,
    ranked_splits,
    split_by_law,
    with_keys,
    worth_simulating,
)
from omni_async.simulation.tune.search import LOSS, MODEST, Point, Trials, fastest, search
from omni_async.simulation.tune.tuning import front
from tests.simulation.tune.tune_world import PROFILE, job, simulate_by_law


def trials_of(config, profile=PROFILE, simulate=simulate_by_law, budget=200, **more):
    return Trials(config, profile, simulate, kept=more.pop("kept", {}), budget=budget, **more)


def searched(trials, devices=3):
    return search(
        trials, worth_simulating(trials.config, ranked_splits(trials.config, trials.profile, devices, trials.kept))
    )


@pytest.mark.parametrize("publish_s", [0.5, 8.0, 20.0, 60.0, 200.0])
def test_it_recommends_the_smallest_budget_within_two_percent_of_the_best(publish_s):
    slow = replace(PROFILE, publish=ServiceTime(fixed_s=publish_s))
    trials = trials_of(job(), slow)
    chosen = searched(trials)
    best = fastest(trials.points).images_per_s
    assert chosen.images_per_s >= (1 - LOSS) * best
    # The law says from where on more staleness is worth nothing; the simulator here is the law.
    times = split_by_law(trials.config, slow, chosen.keys).times
    enough = math.ceil(times.latency * (1 - LOSS) / times.bottleneck[1]) - 1
    assert chosen.keys[key.S] == enough <= smallest_useful_budget(times)


def test_it_finds_the_split_that_balances_the_stages_and_raises_what_cuts_the_engines_batches():
    chosen = searched(trials_of(job(rollout={"max_inflight": 2})), devices=6)
    assert (chosen.keys[key.ENGINES], chosen.keys[key.RANKS], chosen.keys[key.INFLIGHT]) == (4, 2, 4)


def test_nothing_is_larger_than_it_has_to_be():
    trials = trials_of(job(), replace(PROFILE, publish=ServiceTime(fixed_s=20.0)))
    chosen = searched(trials)
    assert (chosen.keys[key.WINDOW], chosen.keys[key.PUBLISH], chosen.keys[key.SWAP]) == (1, 1, "step")
    assert chosen.keys[key.INFLIGHT] == job().rollout.max_inflight
    assert chosen.keys[key.TRAJECTORIES] == fewest_trajectories(job(), chosen.keys)  # this simulator cares for no more
    reference = fastest([point for point in trials.points if point.keys[key.S] == chosen.keys[key.S]]).images_per_s
    assert chosen.images_per_s >= (1 - MODEST) * reference
    fewer = trials.moved(chosen, key.GROUPS, chosen.keys[key.GROUPS] - 1)
    assert fewer.images_per_s < (1 - MODEST) * reference


def test_publishing_less_often_is_recommended_where_exports_stop_the_trainer():
    def exports_cost(config, profile, **more):
        simulated = simulate_by_law(config, profile, **more)
        free = replace(config, weights=replace(config.weights, publish_every=1))
        step = simulate_by_law(free, profile, **more).step_s + 30.0 / config.weights.publish_every
        return replace(simulated, step_s=step, images_per_s=32 / step)

    assert searched(trials_of(job(), simulate=exports_cost)).keys[key.PUBLISH] > 1


EXACT = job(staleness={"exact": True})
SLOW = replace(PROFILE, publish=ServiceTime(fixed_s=60.0))
VARIED = replace(PROFILE, generate=ServiceTime(unit_s=1.0, cv=0.1))
KEPT = {key.S: 2, key.GROUPS: 9, key.TRAJECTORIES: 40, key.RANKS: 1}


@pytest.mark.parametrize(
    ("config", "profile", "kept", "budget"),
    [
        pytest.param(job(), PROFILE, {}, 200, id="plain"),
        pytest.param(replace(job(), schedule="async"), PROFILE, {}, 200, id="the schedule decides the swap"),
        pytest.param(EXACT, SLOW, {}, 200, id="what staleness.exact demands"),
        pytest.param(job(), PROFILE, KEPT, 200, id="kept keys"),
        *(pytest.param(job(), VARIED, {}, budget, id=f"budget {budget}") for budget in (12, 14, 20, 30)),
    ],
)
def test_a_search_keeps_to_schema_kept_keys_and_budget_and_simulates_nothing_twice(config, profile, kept, budget):
    seen = []

    def counting(config, profile, **more):
        seen.append((config, more["seed"]))
        return simulate_by_law(config, profile, **more)

    trials, again = (trials_of(config, profile, how, budget, kept=kept) for how in (counting, simulate_by_law))
    chosen = searched(trials, devices=6)
    assert chosen in trials.points and chosen.images_per_s >= (1 - LOSS) * fastest(trials.points).images_per_s
    assert 1 < len(seen) == trials.made <= budget and all(one not in seen[:number] for number, one in enumerate(seen))
    assert all(check(with_keys(config, point.keys)) is None for point in trials.points)
    assert all({path: point.keys[path] for path in kept} == kept for point in trials.points)
    assert config.schedule is None or {point.keys[key.SWAP] for point in trials.points} == {"step"}
    assert chosen == searched(again, devices=6) and trials.points == again.points


def test_where_chance_decides_the_plainer_value_wins():
    """Lets windows seem to gain 1 %, and so does another seed."""

    def by_chance(config, profile, *, seed, **more):
        simulated = simulate_by_law(config, profile, seed=seed, **more)
        luck = 1 + 0.01 * (config.buffer.window > 1) + 0.01 * (seed % 2)
        return replace(simulated, step_s=simulated.step_s / luck, images_per_s=simulated.images_per_s * luck)

    trials = trials_of(job(), VARIED, by_chance)
    assert searched(trials).keys[key.WINDOW] == 1
    assert trials.noise == pytest.approx(0.005, rel=0.05)
    certain = trials_of(job(), PROFILE, by_chance)
    assert searched(certain).keys[key.WINDOW] == 2
    assert certain.noise == 0


def asked(config, profile=PROFILE):
    """Returns the updates and the bundle with which a search simulates a job."""
    found = []

    def simulate(config, profile, *, updates, bundle, **more):
        found.append((updates, bundle))
        return simulate_by_law(config, profile, updates=updates, bundle=bundle, **more)

    trials_of(config, profile, simulate).run(config, {})
    return found[0]


def test_runs_are_longer_where_fewer_jobs_average_out_what_varies_and_large_jobs_are_bundled() -> None:
    scores = [ServiceTime(unit_s=0.25, cv=cv) for cv in (0.0, 0.2, 0.3, 3.0, 30.0)]
    updates = [asked(job(), replace(PROFILE, score=score))[0] for score in scores]
    assert updates[0] < updates[1] < updates[2] and updates[3] == updates[4]
    rollout = {"group_size": 24, "max_batch": 12, "max_inflight": 36}  # no batch has to split a bundle
    large = job(rollout=rollout, reward={"batch": 8}, trainer={"groups_per_update": 512})
    assert (asked(job())[1], asked(large)[1]) == (1, 4)


def test_fewer_slots_are_not_taken_for_enough_when_a_few_more_are_faster():
    """Takes a job in which, at S = 0, whole waves lose to half ones, because halves overlap."""

    def halves_overlap(config, profile, **more):
        simulated = simulate_by_law(config, profile, **more)
        speed = {1: 1.05, 2: 1.2}.get(config.buffer.groups, 1.0)
        return replace(simulated, step_s=10 / speed, images_per_s=3.2 * speed)

    trials = trials_of(job(staleness={"max_updates": 0}), simulate=halves_overlap, kept={key.S: 0})
    chosen = searched(trials)
    assert chosen.keys[key.GROUPS] == 2 and chosen.images_per_s == fastest(trials.points).images_per_s


ANY = simulate_by_law(job(), PROFILE, updates=1, seed=0, bundle=1)


def point(images_per_s, mean, largest):
    return Point(
        {"staleness.max_updates": largest}, images_per_s, replace(ANY, staleness_mean=mean, staleness_max=largest)
    )


SYNC = point(1.0, 0.0, 0)
HALF, GOOD, STALE, SLOW = point(1.5, 0.5, 1), point(2.0, 1.0, 1), point(2.0, 3.0, 4), point(1.2, 1.0, 2)
LOW_MEAN, LOW_MAXIMUM = point(2.0, 0.5, 4), point(2.0, 1.5, 2)


@pytest.mark.parametrize(
    ("points", "chosen", "shown"),
    [
        # Slower points that are no fresher are left out; either mean or maximum makes a point fresher.
        ([SLOW, STALE, GOOD, HALF, SYNC], GOOD, [SYNC, HALF, GOOD]),
        ([LOW_MEAN, LOW_MAXIMUM], LOW_MEAN, [LOW_MEAN, LOW_MAXIMUM]),
        # A gain within rounding is not worth a row; the chosen point is there once, even if another is a little faster.
        ([SYNC, point(1.001, 1.0, 1)], SYNC, [SYNC]),
        ([SYNC, point(1.001, 0.5, 1), GOOD], GOOD, [SYNC, GOOD]),
        ([SYNC, GOOD, point(2.004, 1.0, 1)], GOOD, [SYNC, GOOD]),
    ],
)
def test_the_front_shows_what_more_staleness_buys(points, chosen, shown):
    assert front(points, chosen) == shown


@pytest.mark.parametrize("chosen", [0, 17, 39])
def test_a_long_front_is_thinned_but_keeps_its_ends_and_the_chosen_point(chosen):
    points = [point(1.0 + 0.1 * i, i / 10, 4) for i in range(40)]
    shown = front(points, points[chosen])
    assert len(shown) == 12
    assert points[chosen] in shown
    assert shown[-1] == points[-1]


@given(st.lists(st.builds(point, st.floats(1, 100), st.floats(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
def test_no_row_is_beaten_by_another(points):
    chosen = max(points, key=lambda p: p.images_per_s)
    rows = [row for row in front(points, chosen) if row != chosen]
    for row, other in permutations(rows, 2):
        fresher = all(
            getattr(other.simulated, name) <= getattr(row.simulated, name)
            for name in ("staleness_mean", "staleness_max")
        )
        assert not (fresher and other.images_per_s > row.images_per_s)
