"""Tunes a recipe: what makes the most images, as fresh as they can be at that rate.

It chooses the split of N devices, the staleness budget and the buffers. The law ranks the splits, simulations of the
real control plane find the rest. Pure computation: waits for nothing, and is the same for the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from omni_async.actors.plan import require_trainable
from omni_async.config import Config, ConfigError
from omni_async.config.checks import check
from omni_async.config.schedule import apply_schedule, num_devices
from omni_async.config.schema import ScheduleName
from omni_async.performance.law import StageTimes
from omni_async.performance.profile import Profile
from omni_async.tune.explain import Explainer
from omni_async.tune.keys import INFLIGHT, SPLIT, SWAP, TUNED, Value, keys_of, with_keys
from omni_async.tune.search import Point, Simulate, Trials, fastest, search
from omni_async.tune.split import device_kind, devices_each, ranked_splits, share_cpus, split_by_law, worth_simulating

# A search that cannot scan one split says nothing.
SMALLEST_BUDGET = 12
IN_STEP: tuple[ScheduleName, ...] = ("sync", "sync_colocated")


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. Seconds and rates are the profile's.

    devices_each: devices that one worker of each role takes. keys: the keys to write into the recipe; reasons: a
    sentence per key. chosen, fastest: the recommended point, and the one that makes the most images. points: every
    point of the search; front: what more staleness buys, freshest first. recipe: the recipe as it is, on
    `recipe_devices`. in_step: schedules without overlap on the chosen devices, by name. times: of the chosen split, by
    the law. noise: the change that another seed makes, as a fraction of images/s. spent: the budget ended the search.
    shared: the devices are CPUs, fewer than the roles take, so the split is the recipe's."""

    devices: int
    kind: str
    devices_each: dict[str, float]
    profile: str
    keys: dict[str, Value]
    reasons: dict[str, str]
    chosen: Point
    fastest: Point
    front: list[Point]
    points: list[Point]
    recipe: Point
    recipe_devices: float
    in_step: dict[str, Point]
    times: StageTimes
    noise: float
    simulations: int
    spent: bool
    shared: bool = False

    @property
    def is_no_slower(self) -> bool:
        """Return whether the chosen keys are as fast as the recipe, if that takes no more devices."""
        return self.recipe_devices > self.devices or self.chosen.images_per_s >= self.recipe.images_per_s


def tune(
    config: Config,
    profile: Profile,
    devices: int,
    simulate: Simulate,
    *,
    budget: int,
    seed: int = 0,
    keep: Collection[str] = (),
    progress: Callable[[int, Point], None] | None = None,
) -> Tuned:
    """Search for the best keys of a recipe.

    Args:
        config: The recipe.
        profile: The service times of its devices.
        devices: How many there are to deal.
        simulate: `omni_async.simulation.simulate.simulate`, or a stand-in for it.
        budget: Most simulations.
        seed: Of the service times.
        keep: Keys that stay as the recipe says.
        progress: Called with the number of simulations made, and the last one.

    Raises:
        ConfigError: There is nothing to tune.
    """
    if config.data.preferences is not None:
        raise ConfigError("data.preferences: nothing is generated, so nothing overlaps and there is nothing to tune")
    if budget < SMALLEST_BUDGET:
        raise ConfigError(f"--budget: expected at least {SMALLEST_BUDGET} simulations, got {budget}")
    require_trainable(config)
    base = overlapped(config)
    shared = share_cpus(base, devices, keys_of(base, keep))
    kept = keys_of(base, {*keep, *(SPLIT if shared else ())})
    trials = Trials(base, profile, simulate, kept=kept, budget=budget - len(IN_STEP), seed=seed, progress=progress)
    ranked = ranked_splits(base, profile, devices, kept)
    if ranked[0].step_s == 0:
        raise ConfigError(f"--profile: nothing takes any time in profile {profile.name!r}, so there is nothing to tune")
    recipe_devices = min(devices, num_devices(config)) if shared else num_devices(config)
    recipe = _as_it_is(trials, config, fits=recipe_devices <= devices)
    chosen = search(trials, worth_simulating(base, ranked))
    spent = trials.spent
    explained = Explainer(trials, chosen, ranked, devices).reasons()  # with what the search has simulated alone
    in_step = _in_step(trials, chosen, ("sync",) if shared else IN_STEP)
    return Tuned(
        devices=devices,
        kind=device_kind(base),
        devices_each=devices_each(base),
        profile=profile.name,
        keys=_to_write(config, base, chosen, kept),
        reasons=explained,
        chosen=chosen,
        fastest=fastest(trials.points),
        front=front(trials.points, chosen),
        points=trials.points,
        recipe=recipe,
        recipe_devices=recipe_devices,
        in_step=in_step,
        times=split_by_law(base, profile, chosen.keys).times,
        noise=trials.noise,
        simulations=trials.made,
        spent=spent,
        shared=shared,
    )


def _as_it_is(trials: Trials, config: Config, *, fits: bool) -> Point:
    """Simulate the recipe.

    If it fits on the devices, nothing slower may be recommended, and it is a candidate itself where nothing but tuned
    keys sets it apart from the others."""
    keys = keys_of(config, TUNED)
    point = (trials.at(keys) if fits and trials.config == config else None) or trials.run(config, keys)
    trials.floor = point.images_per_s if fits else 0.0
    return point


def overlapped(config: Config) -> Config:
    """Return the recipe itself if its roles may overlap, else with `schedule: async`."""
    in_turns = config.placement.colocated or not config.reward.streaming or config.trainer.streaming == "off"
    if config.schedule is None and not in_turns:
        return config
    return apply_schedule(replace(config, schedule="async"))


def _in_step(trials: Trials, chosen: Point, schedules: Collection[ScheduleName]) -> dict[str, Point]:
    """Simulate the synchronous schedules on the chosen devices, where the schema allows them."""
    found: dict[str, Point] = {}
    for schedule in schedules:
        config = apply_schedule(replace(with_keys(trials.config, chosen.keys), schedule=schedule))
        if check(config) is None:
            found[schedule] = trials.run(config, keys_of(config, TUNED))
    return found


def _to_write(config: Config, base: Config, chosen: Point, kept: dict[str, Value]) -> dict[str, Value]:
    keys: dict[str, Value] = {} if base.schedule == config.schedule else {"schedule": "async"}
    keys |= {path: value for path, value in chosen.keys.items() if path not in kept}
    if keys.get(INFLIGHT) == config.rollout.max_inflight:
        del keys[INFLIGHT]
    if base.schedule is not None:
        keys.pop(SWAP, None)  # the schedule decides it
    return keys


# A point must be this much faster than every fresher one to be worth a row.
_WORTH = 0.005
_FRESHER = 0.05
_ROWS = 12


def front(points: Sequence[Point], chosen: Point) -> list[Point]:
    """Return the front, freshest first.

    Each point is faster than all before it whose staleness, mean and maximum, is no higher. `chosen` is always among
    them."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.simulated.staleness_max, _mean(p), -p.images_per_s)):
        fresher = [other.images_per_s for other in kept if _mean(other) <= _mean(point)]
        if not fresher or point.images_per_s > (1 + _WORTH) * max(fresher):
            kept.append(point)
    kept = [*(point for point in kept if not _same(point, chosen)), chosen]
    return sorted(_thinned(kept, chosen), key=lambda point: (point.images_per_s, _mean(point)))


def _mean(point: Point) -> float:
    return point.simulated.staleness_mean


def _same(point: Point, chosen: Point) -> bool:
    """Return whether a point is as fast as the chosen one, and no fresher by more than chance."""
    as_fast = abs(point.images_per_s / chosen.images_per_s - 1) <= _WORTH
    fresher = _mean(point) <= _mean(chosen) - _FRESHER
    return as_fast and not fresher and point.simulated.staleness_max >= chosen.simulated.staleness_max


def _thinned(points: list[Point], chosen: Point) -> list[Point]:
    """Keep at most _ROWS points: as long as there are more, drops the one whose next faster neighbour is closest."""
    points = sorted(points, key=lambda point: point.images_per_s)
    while len(points) > _ROWS:
        gaps = [after.images_per_s / before.images_per_s for before, after in pairwise(points)]
        del points[min((gap, i) for i, gap in enumerate(gaps) if points[i] is not chosen)[1]]
    return points
