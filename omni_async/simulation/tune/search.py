"""Searches for the recommended keys.

First it finds the throughput of each split by staleness, then the smallest and plainest settings with the same
throughput.

    scan     the best splits with every budget S, without any other bound
    refine   at the smallest S within LOSS of the best: buffers as small, windows as narrow and publishes as frequent as
             cost at most MODEST
    rescan   the refined keys with the other splits and with every S: is a smaller one enough by now?

No recommended point generates fewer images per second than `trials.floor`, unless no point reaches it. Deterministic:
the order of simulations and every choice follow from the settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from omni_async.config import Config, ConfigError
from omni_async.config.checks import check
from omni_async.performance.law import smallest_useful_budget
from omni_async.performance.profile import Profile
from omni_async.simulation.result import Simulated
from omni_async.simulation.sweep import choose_bundle
from omni_async.simulation.tune import keys as key
from omni_async.simulation.tune.keys import (
    Keys,
    Split,
    Value,
    count,
    dealt,
    devices_each,
    fewest_trajectories,
    half_batch,
    moved,
    roomy,
    values,
    with_keys,
)

# Throughput that a smaller S may cost, and that any other smaller or plainer value may cost, as fractions; more if
# another seed changes more.
LOSS = 0.02
MODEST = 0.005
_NOISES = 3.0

# Number of splits whose budgets are scanned; larger budgets than this are simulated only if the law requires them.
_SCANNED = 3
_EVERY_BUDGET_TO = 6
_ROUNDS = 3

BUFFER_NAMES = {key.TRAJECTORIES: "trajectories", key.GROUPS: "replay"}


def search(trials: Trials, splits: Sequence[Split]) -> Point:
    """Return the recommended point; `trials` then holds all simulated points.

    `splits`: the best by the law first."""
    # A kept publish interval bounds the budget from below.
    fewest = count(trials.kept, key.PUBLISH) - 1 if key.PUBLISH in trials.kept else 0
    kept = key.S in trials.kept
    budgets = [count(trials.kept, key.S)] if kept else budgets_to_scan(splits[0], trials.variation, fewest)
    asked = [(budget, trials.refusal(roomy(trials.config, splits[0].keys, budget))) for budget in budgets]
    budgets = [budget for budget, problem in asked if problem is None]
    if not budgets:
        raise ConfigError(asked[0][1] or "")
    scan(trials, splits, budgets)
    here = refine(trials, narrowed(trials))
    for _ in range(_ROUNDS):
        for split in splits:
            trials.at(dealt(trials.config, here.keys, split.keys))
        for budget in budgets:
            trials.moved(here, key.S, budget)
        start = narrowed(trials)
        if _budget(start) == _budget(here) or trials.spent:
            break
        here = refine(trials, start)
    return here if here.images_per_s >= _recommendable(trials) else smallest_budget(trials)


def budgets_to_scan(split: Split, variation: float, fewest: int = 0) -> list[int]:
    """Return the budgets S to simulate, ascending: up to two more than the law requires, with only a few large ones.

    Args:
        split: the split whose stage times the law uses.
        variation: the largest coefficient of variation of a stage.
        fewest: the smallest budget that is allowed."""
    needed = smallest_useful_budget(split.times, variation)
    top = max(needed, fewest, 1) + 2
    every = range(min(top, _EVERY_BUDGET_TO) + 1)
    beyond = range(_EVERY_BUDGET_TO, top + 1, max(1, (top - _EVERY_BUDGET_TO) // 4))
    return sorted(budget for budget in {*every, *beyond, fewest, top} if budget >= fewest)


def scan(trials: Trials, splits: Sequence[Split], budgets: Sequence[int]) -> None:
    """Simulate every split with the largest budget, then the few splits close to the best with all budgets.

    Args:
        trials: receives the points, and the noise measured at the fastest.
        splits: the splits worth simulating.
        budgets: values of S, ascending."""
    config, top = trials.config, budgets[-1]
    reached = [(point.images_per_s, split) for split in splits if (point := trials.at(roomy(config, split.keys, top)))]
    trials.measure_noise(fastest(trials.points))
    best = max(speed for speed, _ in reached)
    enough = (1 - tolerated(trials.noise, LOSS)) * best
    close = sorted((pair for pair in reached if pair[0] >= enough), key=lambda pair: -pair[0])
    for _, split in close[:_SCANNED]:
        for budget in budgets:
            trials.at(roomy(config, split.keys, budget))


def fastest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: (point.images_per_s, -_budget(point)))


def tolerated(noise: float, loss: float) -> float:
    """Return the fraction of images per second that may be lost for a smaller or plainer setting.

    It is at least the variation due to chance."""
    return max(loss, _NOISES * noise)


def _recommendable(trials: Trials) -> float:
    """Return the images per second that a recommendation needs.

    That is within LOSS of the best, and no fewer than the recipe's, if any point reaches those."""
    best = fastest(trials.points).images_per_s
    return max((1 - tolerated(trials.noise, LOSS)) * best, min(trials.floor, best))


def smallest_budget(trials: Trials) -> Point:
    """Return the fastest point of the smallest S that is within LOSS of the best."""
    points, enough = trials.points, _recommendable(trials)
    smallest = min(_budget(point) for point in points if point.images_per_s >= enough)
    return fastest([point for point in points if _budget(point) == smallest])


def narrowed(trials: Trials) -> Point:
    """Return `smallest_budget`, after simulating budgets between it and the next smaller simulated one."""
    while True:
        start = smallest_budget(trials)
        budget = _budget(start)
        below = max((_budget(point) for point in trials.points if _budget(point) < budget), default=budget)
        if budget - below <= 1 or trials.moved(start, key.S, (below + budget) // 2) is None:
            return start


def refine(trials: Trials, start: Point) -> Point:
    """Move from `start` with roomy buffers to the most modest point that is nearly as fast.

    It is at most MODEST slower than any found on the way. Ends when a whole round of keys changes nothing, so all of
    them were compared at the returned point."""
    here, seen = start, [start]
    for _ in range(_ROUNDS):
        before = here
        for path in (key.TRAJECTORIES, key.GROUPS):
            if path not in trials.kept:
                seen += _bisected(trials, here, path, _grid(trials.config, here, path), _enough(trials, seen))
                here = _plainest(trials, here, path, seen)
        for path in _short_lists(trials):
            seen += [p for value in values(trials.config, here.keys, path) if (p := trials.moved(here, path, value))]
            here = _plainest(trials, here, path, seen)
        if here == before:
            break
    return here


def _short_lists(trials: Trials) -> list[str]:
    """List the keys with few values."""
    paths = [key.WINDOW, key.PUBLISH, key.INFLIGHT]
    if trials.config.schedule is None:
        paths.append(key.SWAP)  # otherwise the schedule decides it
    if not devices_each(trials.config)[key.REWARDERS]:
        paths.append(key.REWARDERS)
    return [path for path in paths if path not in trials.kept]


def _enough(trials: Trials, seen: Sequence[Point]) -> float:
    """Return the images per second that a plainer setting must reach."""
    return max((1 - tolerated(trials.noise, MODEST)) * fastest(seen).images_per_s, _recommendable(trials))


def _plainest(trials: Trials, here: Point, path: str, seen: Sequence[Point]) -> Point:
    """Return the plainest point that is fast enough, else the fastest.

    All of them differ from `here` only by this key."""
    others = trials.compared(here, path)
    buffer = path in BUFFER_NAMES
    order = sorted([*others, here.keys[path]], key=int) if buffer else values(trials.config, here.keys, path)
    tried = [point for value in order if (point := here if value == here.keys[path] else others.get(value))]
    enough = _enough(trials, seen)
    return next((point for point in tried if point.images_per_s >= enough), fastest([*tried, here]))


def _bisected(trials: Trials, here: Point, path: str, grid: Sequence[int], enough: float) -> list[Point]:
    """Return the points tried on the ascending grid.

    They are the path of a bisection for the smallest value that reaches `enough` images per second."""
    tried: list[Point] = []
    low, high = 0, len(grid) - 1
    while low <= high:
        middle = (low + high) // 2
        point = trials.moved(here, path, grid[middle])
        if point is None:
            break
        tried.append(point)
        low, high = (low, middle - 1) if point.images_per_s >= enough else (middle + 1, high)
    return tried


def _grid(config: Config, here: Point, path: str) -> list[int]:
    """List sizes of a buffer up to the most slots that were ever reserved at once.

    Trajectories: from full batches of every engine, by half batches; groups: by quarters of an update."""
    if path == key.TRAJECTORIES:
        fewest, unit = fewest_trajectories(config, here.keys), half_batch(config, here.keys)
    else:
        fewest = unit = max(1, config.trainer.groups_per_update // 4)
    occupancy = here.simulated.buffers[BUFFER_NAMES[path]]
    # The simulator may count bundles, so only the fraction is meaningful.
    most = math.ceil(count(here.keys, path) * occupancy.largest / occupancy.capacity)
    return [fewest + unit * i for i in range(max(0, math.ceil((most - fewest) / unit)) + 1)]


def _budget(point: Point) -> int:
    return count(point.keys, key.S)


# Updates in the steady part of a run: enough to know the mean of the most variable stage to _PRECISION, within these
# bounds.
_FEWEST_UPDATES = 16
_MOST_UPDATES = 160
_PRECISION = 0.005
# Few enough that a run takes about a second; the same in every run.
_MOST_BUNDLES = 10_000
_SEEDS = 3


class Simulate(Protocol):
    """`omni_async.simulation.simulate.simulate`, or a stand-in for it."""

    def __call__(
        self, config: Config, profile: Profile, *, updates: int | None, seed: int, bundle: int | None
    ) -> Simulated: ...


class Point(msgspec.Struct, frozen=True):
    """A setting and its result; images per second of the profile's time, over all devices together."""

    keys: dict[str, Value]
    images_per_s: float
    simulated: Simulated


@dataclass
class Trials:
    """The simulations of a search: each setting once, all with the same seed, at most as many as `budget` allows.

    `kept`: keys that stay unchanged, overriding any request. `progress` is called with the number of finished
    simulations, and the last one. `noise`: see `measure_noise`. `floor`: the fewest images per second of a
    recommendation, if any point reaches them."""

    config: Config
    profile: Profile
    simulate: Simulate
    kept: Keys
    budget: int
    seed: int = 0
    progress: Callable[[int, Point], None] | None = None
    made: int = 0
    noise: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        self._steady = steady_updates(self.config, self.profile)
        self._bundle = choose_bundle(self.config, self._steady, _MOST_BUNDLES, fewest=0)
        self._points: dict[tuple[tuple[str, Value], ...], Point | None] = {}

    @property
    def spent(self) -> bool:
        return self.made >= self.budget

    @property
    def variation(self) -> float:
        """Return the largest coefficient of variation of a stage."""
        return max(stage.variation for stage in self.profile.stages().values())

    @property
    def points(self) -> list[Point]:
        return [point for point in self._points.values() if point is not None]

    def moved(self, here: Point, path: str, value: Value) -> Point | None:
        """Simulate a point with one key changed, and its dependent keys.

        Args:
            here: the point to start from.
            path: the key.
            value: its new value.

        Returns:
            The new point, or None as `at` does."""
        return self.at(moved(self.config, here.keys, path, value))

    def compared(self, here: Point, path: str) -> dict[Value, Point]:
        """Return all simulated points that differ from `here` only by that key, by its value."""
        found = {}
        for point in self.points:
            value = point.keys[path]
            if value != here.keys[path] and {**moved(self.config, here.keys, path, value), **self.kept} == point.keys:
                found[value] = point
        return found

    def at(self, keys: Keys) -> Point | None:
        """Return the result of these keys.

        None if the schema refuses the keys, or if they have not been simulated and the budget is spent."""
        keys = {**keys, **self.kept}
        name = tuple(sorted(keys.items()))
        if name not in self._points:
            if self.refusal(keys) is not None:
                self._points[name] = None
            elif self.spent:
                return None
            else:
                self._points[name] = self.run(with_keys(self.config, keys), keys)
        return self._points[name]

    def refusal(self, keys: Keys) -> str | None:
        """Return why the schema refuses these keys; None if it does not."""
        return check(with_keys(self.config, {**keys, **self.kept}))

    def measure_noise(self, point: Point) -> None:
        """Measure the effect of another seed, as a fraction of images per second: half the range over a few seeds.

        Smaller differences are meaningless."""
        if self.variation:
            config = with_keys(self.config, point.keys)
            others = (self.run(config, point.keys, self.seed + i) for i in range(1, _SEEDS))
            speeds = [point.images_per_s, *(other.images_per_s for other in others)]
            self.noise = (max(speeds) - min(speeds)) / 2 / point.images_per_s

    def run(self, config: Config, keys: dict[str, Value], seed: int | None = None) -> Point:
        """Simulate any configuration of the same job, even beyond the budget.

        Args:
            config: the configuration to simulate.
            keys: its tuned keys, for the point.
            seed: of the service times; None: the search's."""
        seed = self.seed if seed is None else seed
        updates = self._steady + 2 * (config.staleness.max_updates + 1)
        simulated = self.simulate(config, self.profile, updates=updates, seed=seed, bundle=self._bundle)
        simulated = replace(simulated, wall_s=0.0)  # the duration of the search is not part of its result
        point = Point(keys, simulated.images_per_s, simulated)
        self.made += 1
        if self.progress is not None:
            self.progress(self.made, point)
        return point


def steady_updates(config: Config, profile: Profile) -> int:
    """Return the number of updates that a run needs.

    It grows with the variation of the service times, and falls with the number of jobs that average it out."""
    samples = config.trainer.groups_per_update * config.rollout.group_size
    jobs = (
        (profile.generate, samples / config.rollout.max_batch),
        (profile.score, samples / config.reward.batch),
        (profile.train, config.trainer.groups_per_update),
    )
    needed = max((stage.variation / _PRECISION) ** 2 / max(1.0, count) for stage, count in jobs)
    return math.ceil(min(max(needed, _FEWEST_UPDATES), _MOST_UPDATES))
