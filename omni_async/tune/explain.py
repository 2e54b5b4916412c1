"""Explains why each key has its value: one sentence, with the numbers of the law and of the simulations beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from omni_async.tune.keys import (
    ENGINES,
    GROUPS,
    INFLIGHT,
    PUBLISH,
    RANKS,
    REWARDERS,
    SPLIT,
    SWAP,
    TRAJECTORIES,
    WINDOW,
    S,
    Value,
    count,
    dealt,
    fewest_trajectories,
)
from omni_async.tune.search import BUFFER_NAMES, Point, Trials
from omni_async.tune.split import Split, device_kind, devices_each, split_by_law

# Changes smaller than this are rounding.
_NOTHING = 0.0025

_STAGES = {"rollout": "generation", "reward": "scoring", "trainer": "training"}

# What the plainest value of a key means, and what any other does.
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
        self._chosen = chosen
        self._devices = devices
        self._split = split_by_law(trials.config, trials.profile, chosen.keys)
        dealt_to = [path for path, each in devices_each(trials.config).items() if each]
        self._other = next(
            (split for split in ranked if any(split.keys[path] != self._split.keys[path] for path in dealt_to)), None
        )

    def reasons(self) -> dict[str, str]:
        """Return a sentence for every key that was not kept.

        There is one for `schedule` too, where the recipe's own would stop everything from overlapping."""
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

    def _value(self, path: str) -> Value:
        return self._chosen.keys[path]

    def _plain(self, path: str, meaning: str, otherwise: str) -> str:
        value = self._value(path)
        return f"{value} ({meaning if value in _PLAINEST else otherwise}), because {self._against(path)}"

    def _against(self, path: str) -> str:
        """Compare with the nearest other values; of numbers one smaller and one larger."""
        others = self._trials.compared(self._chosen, path)
        numbers = sorted(value for value in others if isinstance(value, int))
        here = self._value(path)
        near: list[Value] = [value for value in others if isinstance(value, str)]
        if isinstance(here, int):
            near = [*[v for v in numbers if v < here][-1:], *[v for v in numbers if v > here][:1]]
        if near:
            return ", ".join(f"{value} {self._change(others[value])}" for value in near)
        return (
            f"it may be at most S + 1 = {here}"
            if path == PUBLISH and here == count(self._chosen.keys, S) + 1
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
            f"{self._value(S)}, because a wave, from admission to weights that learned from it, takes {waves:.2f} times"
            f" what {_STAGES[stage]} takes per update ({seconds(times.latency)} / {seconds(slowest)});"
            f" {self._against(S)}"
        )

    def _workers(self, path: str) -> str:
        name, workers = path.split(".")[0], count(self._chosen.keys, path)
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
        slots = (count(self._chosen.keys, S) + 1) * self._config.trainer.groups_per_update
        return f"{self._value(GROUPS)} of the {slots} that S admits: {self._reserved(GROUPS)}; {self._against(GROUPS)}"

    def _trajectories(self) -> str:
        value = count(self._chosen.keys, TRAJECTORIES)
        full = fewest_trajectories(self._config, self._chosen.keys)
        room, against = "", "fewer would cut the batches"
        if value > full:
            room, against = f" ({full}) and {value - full} to be scored", self._against(TRAJECTORIES)
        return f"{value}, for full batches of all engines{room}: {self._reserved(TRAJECTORIES)}; {against}"

    def _reserved(self, path: str) -> str:
        occupancy = self._chosen.simulated.buffers[BUFFER_NAMES[path]]
        unit = count(self._chosen.keys, path) / occupancy.capacity  # the simulator may count bundles
        if occupancy.largest < occupancy.capacity:
            return f"never more than {occupancy.largest * unit:.0f} were reserved"
        return f"all are reserved at times, {occupancy.mean * unit:.0f} on average"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"


def _noun(path: str, workers: int) -> str:
    return f"{workers} {_WORKERS[path][workers != 1]}"
