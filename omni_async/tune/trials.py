"""Runs the simulations of a search: each setting once, all with the same seed, at most as many as the budget says.

Owns every setting that was simulated and its result. Waits for nothing but the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from omni_async.actors.plan import plan_updates
from omni_async.config import Config
from omni_async.config.checks import check
from omni_async.performance.profile import Profile
from omni_async.simulation.bundles import choose_bundle
from omni_async.simulation.result import Simulated
from omni_async.tune.keys import Keys, Value, moved, with_keys

# Updates of the steady part of a run: enough that the mean of the stage that varies most is known to _PRECISION, within
# these bounds.
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


class Trials:
    def __init__(
        self,
        config: Config,
        profile: Profile,
        simulate: Simulate,
        *,
        kept: Keys,
        budget: int,
        seed: int = 0,
        progress: Callable[[int, Point], None] | None = None,
    ) -> None:
        """Take the job and the simulator.

        `kept`: keys that stay as they are, whatever is asked for. `progress` is called with the number of simulations
        made, and the last one. `floor`: images per second that no recommendation may fall short of, where anything
        reaches them."""
        self.config = config
        self.profile = profile
        self.kept = kept
        self.made = 0
        self.noise = 0.0
        self.floor = 0.0
        self._simulate = simulate
        self._budget = budget
        self._seed = seed
        self._progress = progress
        self._steady = steady_updates(config, profile)
        self._bundle = choose_bundle(config, self._steady, _MOST_BUNDLES, fewest=0)
        self._points: dict[tuple[tuple[str, Value], ...], Point | None] = {}

    @property
    def spent(self) -> bool:
        return self.made >= self._budget

    @property
    def points(self) -> list[Point]:
        return [point for point in self._points.values() if point is not None]

    def moved(self, here: Point, path: str, value: Value) -> Point | None:
        """Simulate `here` with one key changed, and what depends on it."""
        return self.at(moved(self.config, here.keys, path, value))

    def compared(self, here: Point, path: str) -> dict[Value, Point]:
        """Return everything simulated so far that differs from `here` by that key alone, by its value."""
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
        """Return why the schema refuses these keys, or why the algorithm cannot stream, which also depends on S.

        It has to where `trainer.streaming: on` demands it."""
        config = with_keys(self.config, {**keys, **self.kept})
        problem = check(config)
        if problem is None and config.trainer.streaming == "on" and (plan := plan_updates(config)).mode == "collect":
            problem = (
                f"trainer.streaming: 'on' cannot be had with a budget of {config.staleness.max_updates}: {plan.why}"
            )
        return problem

    def measure_noise(self, point: Point) -> None:
        """Measure the change that another seed makes, as a fraction of images per second: half the range over a few.

        Smaller differences mean nothing."""
        if any(stage.variation for stage in self.profile.stages().values()):
            config = with_keys(self.config, point.keys)
            speeds = [
                point.images_per_s,
                *(self.run(config, point.keys, self._seed + i).images_per_s for i in range(1, _SEEDS)),
            ]
            self.noise = (max(speeds) - min(speeds)) / 2 / point.images_per_s

    def run(self, config: Config, keys: dict[str, Value], seed: int | None = None) -> Point:
        """Simulate any configuration of the same job, whatever the budget says."""
        seed = self._seed if seed is None else seed
        updates = self._steady + 2 * (config.staleness.max_updates + 1)
        simulated = self._simulate(config, self.profile, updates=updates, seed=seed, bundle=self._bundle)
        simulated = replace(simulated, wall_s=0.0)  # what the search took is not what it found
        point = Point(keys, simulated.images_per_s, simulated)
        self.made += 1
        if self._progress is not None:
            self._progress(self.made, point)
        return point


def steady_updates(config: Config, profile: Profile) -> int:
    """Return the updates that a run needs.

    The more the service times vary and the fewer jobs average that out, the more."""
    samples = config.trainer.groups_per_update * config.rollout.group_size
    jobs = (
        (profile.generate, samples / config.rollout.max_batch),
        (profile.score, samples / config.reward.batch),
        (profile.train, config.trainer.groups_per_update),
    )
    needed = max((stage.variation / _PRECISION) ** 2 / max(1.0, count) for stage, count in jobs)
    return math.ceil(min(max(needed, _FEWEST_UPDATES), _MOST_UPDATES))
