"""Tunes a recipe for the most images per second with the least staleness, and gives a reason for every key.

It chooses the split of N devices, the staleness budget and the buffers. The law ranks the splits, simulations of the
real control plane find the rest; the reasons have the numbers of both. Pure and deterministic computation, without
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from omni_async.config import Config, ConfigError
from omni_async.config.checks import check
from omni_async.config.schedule import apply_schedule, num_devices
from omni_async.config.schema import ScheduleName
from omni_async.performance.law import StageTimes, smallest_useful_budget
from omni_async.performance.profile import Profile
from omni_async.roles.plan import require_trainable
from omni_async.simulation.tune.keys import (
    ENGINES,
    GROUPS,
    INFLIGHT,
    PUBLISH,
    RANKS,
    REWARDERS,
    SPLIT,
    SWAP,
    TRAJECTORIES,
    TUNED,
    WINDOW,
    PoolSize,
    S,
    Split,
    Value,
    count,
    dealt,
    device_kind,
    devices_each,
    fewest_trajectories,
    keys_of,
    pool_sizes,
    ranked_splits,
    share_cpus,
    split_by_law,
    with_keys,
    worth_simulating,
)
from omni_async.simulation.tune.search import BUFFER_NAMES, Point, Simulate, Trials, fastest, search

# A search that cannot scan one split has no meaningful result.
SMALLEST_BUDGET = 12
IN_STEP: tuple[ScheduleName, ...] = ("sync", "sync_colocated")


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. Seconds and rates are the profile's.

    - devices_each: devices that one worker of each role takes.
    - keys: the keys to write into the recipe; reasons: a sentence per key.
    - chosen, fastest: the recommended point, and the point with the most images per second.
    - points: every point of the search; front: the gain from more staleness, freshest first.
    - recipe: the unchanged recipe, on `recipe_devices`.
    - in_step: schedules without overlap on the chosen devices, by name.
    - times: of the chosen split, by the law. needed: the smallest S at which its slowest stage never waits, by the law.
    - noise: the effect of another seed, as a fraction of samples/s.
    - spent: the budget ended the search.
    - shared: the devices are CPUs, fewer than the roles take, so the split is the recipe's.
    - pools: the needs of the pools of `reward.pools`."""

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
    needed: int
    noise: float
    simulations: int
    spent: bool
    shared: bool = False
    pools: list[PoolSize] = []

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
        devices: Number of devices to distribute.
        simulate: `omni_async.simulation.simulate.simulate`, or a stand-in for it.
        budget: Most simulations.
        seed: Seed of the service times.
        keep: Keys that keep the recipe's values.
        progress: Called with the number of finished simulations, and the last one.

    Raises:
        ConfigError: There is nothing to tune."""
    if config.data.preferences is not None:
        raise ConfigError("data.preferences: nothing is generated, so nothing overlaps and there is nothing to tune")
    if budget < SMALLEST_BUDGET:
        raise ConfigError(f"--budget: expected at least {SMALLEST_BUDGET} simulations, got {budget}")
    require_trainable(config)
    base = overlapped(config)
    shared = share_cpus(base, devices, keys_of(base, keep))
    kept = keys_of(base, {*keep, *(SPLIT if shared else ()), *((REWARDERS,) if base.unscored else ())})
    trials = Trials(base, profile, simulate, kept=kept, budget=budget - len(IN_STEP), seed=seed, progress=progress)
    ranked = ranked_splits(base, profile, devices, kept)
    if ranked[0].step_s == 0:
        raise ConfigError(f"--profile: nothing takes any time in profile {profile.name!r}, so there is nothing to tune")
    recipe_devices = min(devices, num_devices(config)) if shared else num_devices(config)
    recipe = _as_it_is(trials, config, fits=recipe_devices <= devices)
    chosen = search(trials, worth_simulating(base, ranked))
    spent = trials.spent
    explained = Explainer(trials, chosen, ranked, devices).reasons()  # only with the simulations of the search
    in_step = _in_step(trials, chosen, ("sync",) if shared else IN_STEP)
    times = split_by_law(base, profile, chosen.keys).times
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
        times=times,
        needed=smallest_useful_budget(times, trials.variation),
        noise=trials.noise,
        simulations=trials.made,
        spent=spent,
        shared=shared,
        pools=pool_sizes(base, profile, chosen.keys),
    )


def _as_it_is(trials: Trials, config: Config, *, fits: bool) -> Point:
    """Simulate the recipe.

    If it fits on the devices, no slower point may be recommended. It is a candidate itself if it differs from the
    others only by tuned keys."""
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
    """Simulate the synchronous schedules on the chosen devices, if the schema allows them."""
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

    Each point is faster than all earlier points whose staleness, mean and maximum, is no higher. `chosen` is always
    included."""
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
    """Keep at most _ROWS points: while there are more, drop the point whose next faster neighbour is closest."""
    points = sorted(points, key=lambda point: point.images_per_s)
    while len(points) > _ROWS:
        gaps = [after.images_per_s / before.images_per_s for before, after in pairwise(points)]
        del points[min((gap, i) for i, gap in enumerate(gaps) if points[i] is not chosen)[1]]
    return points


# Changes smaller than this are rounding.
_NOTHING = 0.0025

_STAGES = {"rollout": "generation", "reward": "scoring", "trainer": "training"}

# Meanings of a key's plainest value, and of any other value.
_PLAINEST = (1, "step")
_MEANINGS = {
    WINDOW: ("strict admission order", "younger groups may overtake"),
    PUBLISH: ("every version reaches the engines", "fewer interruptions"),
    SWAP: ("nothing waits for a swap", "engines wait before they swap"),
}

_WORKERS = {ENGINES: ("engine", "engines"), REWARDERS: ("reward worker", "reward workers"), RANKS: ("rank", "ranks")}


class Explainer:
    """An explanation of the keys of one chosen point. `ranked`: all splits, best by the law first."""

    def __init__(self, trials: Trials, chosen: Point, ranked: Sequence[Split], devices: int) -> None:
        self._trials = trials
        self._config = trials.config
        self._chosen, self._keys = chosen, chosen.keys
        self._devices = devices
        self._split = split_by_law(trials.config, trials.profile, chosen.keys)
        dealt_to = [path for path, each in devices_each(trials.config).items() if each]
        self._other = next(
            (split for split in ranked if any(split.keys[path] != self._split.keys[path] for path in dealt_to)), None
        )

    def reasons(self) -> dict[str, str]:
        """Return a sentence for every key that was not kept.

        `schedule` is included if the recipe's own schedule would prevent all overlap."""
        sentences: dict[str, Callable[[], str]] = {
            **{path: partial(self._workers, path) for path in SPLIT},
            S: self._budget,
            GROUPS: self._groups,
            TRAJECTORIES: self._trajectories,
            **{path: partial(self._plain, path, *meanings) for path, meanings in _MEANINGS.items()},
            INFLIGHT: partial(self._plain, INFLIGHT, *2 * (f"for batches of {self._config.rollout.max_batch}",)),
        }
        found = {path: sentence() for path, sentence in sentences.items() if path not in self._trials.kept}
        if self._config.schedule is not None:
            found["schedule"] = "the roles of the recipe take turns; this lets them overlap"
        return found

    def _plain(self, path: str, meaning: str, otherwise: str) -> str:
        value = self._keys[path]
        return f"{value} ({meaning if value in _PLAINEST else otherwise}), because {self._against(path)}"

    def _against(self, path: str) -> str:
        """Compare with the nearest other values; for numbers, one smaller and one larger."""
        others, here = self._trials.compared(self._chosen, path), self._keys[path]
        numbers = sorted(value for value in others if isinstance(value, int))
        near: list[Value] = [value for value in others if isinstance(value, str)]
        if isinstance(here, int):
            near = [*[v for v in numbers if v < here][-1:], *[v for v in numbers if v > here][:1]]
        if near:
            return ", ".join(f"{value} {self._change(others[value])}" for value in near)
        return (
            f"it may be at most S + 1 = {here}"
            if path == PUBLISH and here == count(self._keys, S) + 1
            else "nothing else was simulated"
        )

    def _change(self, other: Point) -> str:
        """Phrase the images per second of `other` against the chosen point: `loses 11 %`."""
        ratio = other.images_per_s / self._chosen.images_per_s - 1
        if abs(ratio) <= max(_NOTHING, self._trials.noise):
            return "changes nothing"
        percent = abs(ratio) * 100
        return f"{'gains' if ratio > 0 else 'loses'} {percent:.{0 if percent >= 10 else 1}f} %"

    def _budget(self) -> str:
        times = self._split.times
        stage, slowest = times.bottleneck
        waves = times.latency / slowest
        return (
            f"{self._keys[S]}, because a wave, from admission to weights that learned from it, takes {waves:.2f} times"
            f" what {_STAGES[stage]} takes per update ({seconds(times.latency)} / {seconds(slowest)});"
            f" {self._against(S)}"
        )

    def _workers(self, path: str) -> str:
        name, workers = path.split(".")[0], count(self._keys, path)
        each = devices_each(self._config)
        stage, slowest = self._split.times.bottleneck
        times = self._split.times
        own = {ENGINES: times.generate + times.pause, REWARDERS: times.score, RANKS: times.train + times.blocked}[path]
        takes = f"{_noun(path, workers)} then take{'s' if workers == 1 else ''} {seconds(own)} per update"
        slower = "the slowest stage" if stage == name else f"{_STAGES[stage]} {seconds(slowest)}"
        parts = [f"{workers}, because {takes}, {slower}"]
        if not each[path]:
            parts.append(f"takes none of the {self._devices} {device_kind(self._config)}")
        if path == REWARDERS and not each[path]:
            parts.append(self._against(path))
        elif path == next((role for role in SPLIT if each[role]), None):
            parts.append(self._alternative())
        return "; ".join(parts)

    def _alternative(self) -> str:
        """Describe the best other split by the law."""
        if self._other is None:
            return f"the {self._devices} {device_kind(self._config)} can be dealt no other way"
        stage, slowest = self._other.times.bottleneck
        workers = " + ".join(_noun(path, self._other.keys[path]) for path in SPLIT if devices_each(self._config)[path])
        point = self._trials.at(dealt(self._config, self._chosen.keys, self._other.keys))
        simulated = f" and {self._change(point)}" if point else ""
        return f"the nearest other split, {workers}, needs {seconds(slowest)} for {_STAGES[stage]}{simulated}"

    def _groups(self) -> str:
        slots = (count(self._keys, S) + 1) * self._config.trainer.groups_per_update
        return f"{self._keys[GROUPS]} of the {slots} that S admits: {self._reserved(GROUPS)}; {self._against(GROUPS)}"

    def _trajectories(self) -> str:
        value = count(self._keys, TRAJECTORIES)
        full = fewest_trajectories(self._config, self._chosen.keys)
        room, against = "", "fewer would cut the batches"
        if value > full:
            room, against = f" ({full}) and {value - full} to be scored", self._against(TRAJECTORIES)
        return f"{value}, for full batches of all engines{room}: {self._reserved(TRAJECTORIES)}; {against}"

    def _reserved(self, path: str) -> str:
        occupancy = self._chosen.simulated.buffers[BUFFER_NAMES[path]]
        unit = count(self._keys, path) / occupancy.capacity  # the simulator may count bundles
        if occupancy.largest < occupancy.capacity:
            return f"never more than {occupancy.largest * unit:.0f} were reserved"
        return f"all are reserved at times, {occupancy.mean * unit:.0f} on average"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"


def _noun(path: str, workers: int) -> str:
    return f"{workers} {_WORKERS[path][workers != 1]}"
