"""Tests the search, with a simulator that follows the law; the tuned keys, and how devices are split."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config.checks import check
from omni_async.config.reward import Pool, Scorer
from omni_async.config.section import Resources
from omni_async.performance.law import smallest_useful_budget
from omni_async.performance.profile import ScorerTime, ServiceTime
from omni_async.simulation.tune import keys as key
from omni_async.simulation.tune.keys import ENGINES, GROUPS, PUBLISH, RANKS, REWARDERS, WINDOW, S
from omni_async.simulation.tune.search import LOSS, MODEST, Point, Trials, fastest, search
from omni_async.simulation.tune.tuning import front
from tests.simulation.tune.tune_world import GPU, PROFILE, job, simulate_by_law


def trials_of(config, profile=PROFILE, simulate=simulate_by_law, budget=200, **more):
    return Trials(config, profile, simulate, kept=more.pop("kept", {}), budget=budget, **more)


def searched(trials, devices=3):
    return search(
        trials,
        key.worth_simulating(trials.config, key.ranked_splits(trials.config, trials.profile, devices, trials.kept)),
    )


@pytest.mark.parametrize("publish_s", [0.5, 8.0, 20.0, 60.0, 200.0])
def test_it_recommends_the_smallest_budget_within_two_percent_of_the_best(publish_s):
    slow = replace(PROFILE, publish=ServiceTime(fixed_s=publish_s))
    trials = trials_of(job(), slow)
    chosen = searched(trials)
    best = fastest(trials.points).images_per_s
    assert chosen.images_per_s >= (1 - LOSS) * best
    # The law says from where on more staleness is worth nothing; the simulator here is the law.
    times = key.split_by_law(trials.config, slow, chosen.keys).times
    enough = math.ceil(times.latency * (1 - LOSS) / times.bottleneck[1]) - 1
    assert chosen.keys[S] == enough <= smallest_useful_budget(times)


def test_runs_are_longer_where_times_vary_and_large_jobs_are_bundled():
    def asked(config, profile=PROFILE):
        found = []

        def simulate(config, profile, *, updates, bundle, **more):
            found.append((updates, bundle))
            return simulate_by_law(config, profile, updates=updates, bundle=bundle, **more)

        trials_of(config, profile, simulate).run(config, {})
        return found[0]

    scores = [ServiceTime(unit_s=0.25, cv=cv) for cv in (0.0, 0.2, 0.3, 3.0, 30.0)]
    updates = [asked(job(), replace(PROFILE, score=score))[0] for score in scores]
    assert updates[0] < updates[1] < updates[2] and updates[3] == updates[4]
    rollout = {"group_size": 24, "max_batch": 12, "max_inflight": 36}  # no batch has to split a bundle
    large = job(rollout=rollout, reward={"batch": 8}, trainer={"groups_per_update": 512})
    assert (asked(job())[1], asked(large)[1]) == (1, 4)


def test_nothing_is_larger_than_it_has_to_be():
    trials = trials_of(job(), replace(PROFILE, publish=ServiceTime(fixed_s=20.0)))
    chosen = searched(trials)
    assert (chosen.keys[WINDOW], chosen.keys[PUBLISH], chosen.keys[key.SWAP]) == (1, 1, "step")
    assert chosen.keys[key.INFLIGHT] == job().rollout.max_inflight
    assert chosen.keys[key.TRAJECTORIES] == key.fewest_trajectories(
        job(), chosen.keys
    )  # this simulator cares for no more
    reference = fastest([point for point in trials.points if point.keys[S] == chosen.keys[S]]).images_per_s
    assert chosen.images_per_s >= (1 - MODEST) * reference
    fewer = trials.moved(chosen, GROUPS, chosen.keys[GROUPS] - 1)
    assert fewer.images_per_s < (1 - MODEST) * reference


def test_publishing_less_often_is_recommended_where_exports_stop_the_trainer():
    def exports_cost(config, profile, **more):
        simulated = simulate_by_law(config, profile, **more)
        free = replace(config, weights=replace(config.weights, publish_every=1))
        step = simulate_by_law(free, profile, **more).step_s + 30.0 / config.weights.publish_every
        return replace(simulated, step_s=step, images_per_s=32 / step)

    assert searched(trials_of(job(), simulate=exports_cost)).keys[PUBLISH] > 1


EXACT = job(staleness={"exact": True})
SLOW = replace(PROFILE, publish=ServiceTime(fixed_s=60.0))
VARIED = replace(PROFILE, generate=ServiceTime(unit_s=1.0, cv=0.1))
KEPT = {S: 2, GROUPS: 9, key.TRAJECTORIES: 40, RANKS: 1}


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
    assert all(check(key.with_keys(config, point.keys)) is None for point in trials.points)
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
    assert searched(trials).keys[WINDOW] == 1
    assert trials.noise == pytest.approx(0.005, rel=0.05)
    certain = trials_of(job(), PROFILE, by_chance)
    assert searched(certain).keys[WINDOW] == 2
    assert certain.noise == 0


def test_fewer_slots_are_not_taken_for_enough_when_a_few_more_are_faster():
    """Takes a job in which, at S = 0, whole waves lose to half ones, because halves overlap."""

    def halves_overlap(config, profile, **more):
        simulated = simulate_by_law(config, profile, **more)
        speed = {1: 1.05, 2: 1.2}.get(config.buffer.groups, 1.0)
        return replace(simulated, step_s=10 / speed, images_per_s=3.2 * speed)

    trials = trials_of(job(staleness={"max_updates": 0}), simulate=halves_overlap, kept={S: 0})
    chosen = searched(trials)
    assert chosen.keys[GROUPS] == 2 and chosen.images_per_s == fastest(trials.points).images_per_s


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
def test_a_long_front_is_thinned_but_keeps_its_end_and_the_chosen_point(chosen):
    points = [point(1.0 + 0.1 * i, i / 10, 4) for i in range(40)]
    shown = front(points, points[chosen])
    assert len(shown) == 12 and points[chosen] in shown and shown[-1] == points[-1]


def keys(split):
    return split.keys[ENGINES], split.keys[REWARDERS], split.keys[RANKS]


def ranked(config, devices, kept=None, profile=PROFILE):
    return key.ranked_splits(config, profile, devices, kept or {})


@pytest.mark.parametrize(
    ("degrees", "useful"),
    [
        ({}, (1, 2, 3, 4)),  # the busiest of them has 8, 4, 3 and 2 samples of a group of 8, and of five no fewer
        ({"workers": 2, "sequence_parallel": 2}, (2, 4)),
        ({"workers": 3, "shard": 3}, (3,)),
    ],
)
def test_every_split_uses_all_devices_and_no_rank_for_nothing(degrees, useful):
    found = {keys(split) for split in ranked(job(placement={"reward": GPU}, trainer=degrees), 7)}
    assert found == {(7 - ranks - rewarders, rewarders, ranks) for ranks in useful for rewarders in range(1, 7 - ranks)}


def test_reward_workers_beside_the_devices_are_as_many_as_stay_below_the_bottleneck():
    [best] = [split for split in ranked(job(), 6) if split.keys[RANKS] == 2]
    # 4 engines take 8.1 s, 2 ranks 8 s; one reward worker would take 8 s, two take 4.
    assert keys(best) == (4, 2, 2)
    assert best.times.score == pytest.approx(4.0)
    slow = replace(PROFILE, score=PROFILE.score.scaled(100))  # but no more than four times the recipe's
    assert {split.keys[REWARDERS] for split in ranked(job(), 4, profile=slow)} == {4}


def test_the_best_split_by_the_law_comes_first_and_far_ones_are_not_simulated():
    found = ranked(job(), 6)
    assert [split.step_s for split in found] == sorted(split.step_s for split in found)
    worth = key.worth_simulating(job(), found)
    assert worth[0] == found[0] and worth[0].keys[RANKS] == 2 and len(worth) < len(found)
    assert all(split.step_s <= 1.1 * found[0].step_s for split in worth)


def test_workers_take_what_placement_says():
    config = job(placement={"rollout": Resources(gpus=2.0), "trainer": Resources(gpus=0.5)})
    assert key.device_kind(config) == "gpus"
    for split in ranked(config, 5):
        used = sum(Fraction(each) * split.keys[path] for path, each in key.devices_each(config).items())
        assert 3 < used <= 5
    # Without accelerators CPUs are dealt, and reward workers count.
    config = job(placement={"rollout": Resources(), "reward": Resources(), "trainer": Resources()})
    assert key.device_kind(config) == "cpus" and {sum(keys(split)) for split in ranked(config, 5)} == {5}
    # Workers that take no devices or are kept stay, even if devices are left over.
    config = job(placement={"trainer": Resources()}, trainer={"workers": 3})
    assert {split.keys[RANKS] for split in ranked(config, 4)} == {3}
    found = ranked(job(trainer={"workers": 3}), 6, {ENGINES: 2, RANKS: 3})
    assert {(split.keys[ENGINES], split.keys[RANKS]) for split in found} == {(2, 3)}


@pytest.mark.parametrize(
    ("config", "devices", "kept", "parts"),
    [
        (job(), 1, {}, "rollout 1 + trainer 1 = 2"),
        (job(placement={"reward": GPU}), 2, {}, "rollout 1 + reward 1 + trainer 1 = 3"),
        (job(placement={"rollout": Resources(gpus=4.0)}), 4, {}, "rollout 4 + trainer 1 = 5"),
        (job(), 4, {RANKS: 4}, "rollout 1 + trainer 4 = 5"),
        (job(trainer={"workers": 6, "sequence_parallel": 2, "shard": 3}), 6, {}, "rollout 1 + trainer 6 = 7"),
    ],
)
def test_too_few_devices_are_refused_with_what_would_do(config, devices, kept, parts):
    with pytest.raises(ConfigError, match=f"--devices: {devices} gpus are fewer than.*{re.escape(parts)}"):
        ranked(config, devices, kept)


def test_splits_that_the_schema_refuses_are_left_out_and_if_it_refuses_all_it_says_why():
    config = job(run={"runtime": "inprocess"}, rollout={"engine": "diffusers"})
    worth = key.worth_simulating(config, ranked(config, 6))
    assert {split.keys[RANKS] for split in worth} == {1}
    config = job(trainer={"backend": "plain", "workers": 2})
    with pytest.raises(ConfigError, match=r"trainer\.backend: 'plain' is one rank"):
        key.worth_simulating(config, ranked(config, 4, {RANKS: 2}))


SPLIT = {ENGINES: 3, REWARDERS: 2, RANKS: 1}


@pytest.mark.parametrize(("path", "value"), [(S, 1), (S, 5), (PUBLISH, 2), (WINDOW, 4)])
def test_what_needs_more_groups_gets_slots_for_all_that_are_admitted(path, value):
    tight = {**key.roomy(job(), SPLIT, 3), GROUPS: 5}
    after = key.moved(job(), tight, path, value)
    assert after[path] == value
    assert after[GROUPS] == (int(after[S]) + 1) * 4
    after = key.moved(job(), {**tight, PUBLISH: 4}, S, 1)  # publishing stays allowed when the budget shrinks
    assert after[PUBLISH] == 2
    assert check(key.with_keys(job(), after)) is None
    assert all(key.moved(job(), tight, path, tight[path]) == tight for path in key.TUNED), "nothing changes"


def test_a_pool_is_told_how_many_workers_keep_it_below_the_bottleneck():
    # 32 samples an update: 32 s of generation and 16 s of training, 32 x 4 s of judging in 2 calls at once.
    profile = replace(PROFILE, scorers={"judge": ScorerTime(ServiceTime(unit_s=4.0)), "ocr": ScorerTime(PROFILE.score)})
    scorers = (Scorer(name="ocr"), Scorer(name="judge", pool="judges", concurrency=2, batch=1))

    def sizes(workers: int) -> list[key.PoolSize]:
        pools = (Pool(name="judges", workers=workers), Pool(name="idle"))
        config = job(reward={"scorers": scorers, "pools": pools, "workers": 1})
        return key.pool_sizes(config, profile, key.keys_of(config, key.TUNED) | {ENGINES: 1, RANKS: 1})

    for workers, takes in ((1, 64.0), (3, 64.0 / 3), (8, 8.0)):
        judges, idle = sizes(workers)
        assert (judges.name, judges.workers, judges.enough) == ("judges", workers, 3)
        assert judges.takes_s == pytest.approx(takes) and judges.others_s == pytest.approx(32, rel=0.05)
        assert (idle.takes_s, idle.enough) == (0.0, 1)
