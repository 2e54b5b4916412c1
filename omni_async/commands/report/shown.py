"""Holds the runs of a page with their names and colours, and groups the seeds of one recipe."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_async.commands.report.blocks import Axis, Block, Series, Tab, series, thin
from omni_async.records.read.record import Run
from omni_async.types import finite

# Keys that may differ between runs of one recipe: storage and length.
_SAME_RECIPE = ("run.", "tracking.", "checkpoint.", "trainer.updates")

UPDATES = Axis("update")
MINUTES = Axis("time since all roles were up", "min")


@dataclass(frozen=True)
class Shown:
    """A run on a page. Runs that differ only in their seed have the same `colour`."""

    run: Run
    label: str
    colour: int

    @property
    def is_emulated(self) -> bool:
        """Return whether all devices are emulated, so that no model and no scorer ran."""
        return isinstance(self.run.setting("emulation"), dict)

    @property
    def is_scored(self) -> bool:
        """Return whether scorers gave rewards: they score no preference pairs, and a teacher may be alone."""
        alone = self.run.setting("algorithm.teacher") and not self.run.setting("reward.scorers")
        return not self.run.setting("data.preferences") and not alone

    def has(self, key: str) -> bool:
        """Return whether any update has the metric."""
        return any(key in line for line in self.run.updates)

    def curve(self, key: str, name: str | None = None) -> Series:
        """Return a metric of every update, by update and by time, thinned if there are very many."""
        return thin(self.points(key, name))

    def points(self, key: str, name: str | None = None) -> Series:
        """Return all points of a metric, however many there are."""
        lines = [line for line in self.run.updates if key in line]
        return series(name or self.label, positions(lines), [line[key] for line in lines], self.colour)


def positions(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the positions of lines of metrics.jsonl on the axes `update` and `minutes`."""
    minutes = [(finite(line.get("wall_s")) or 0.0) / 60 for line in lines]
    return {"update": [float(line["update"]) for line in lines], "minutes": minutes}


def axes() -> dict[str, Axis]:
    return {"update": UPDATES, "minutes": MINUTES}


def show(runs: Sequence[Run]) -> list[Shown]:
    """Name and colour the runs of a page, in their order."""
    names = [f"{run.setting('run.name', run.id)}, seed {run.setting('run.seed', '?')}" for run in runs]
    times, ids = Counter(names), Counter(run.id for run in runs)
    recipes: dict[str, int] = {}
    shown = []
    for run, name in zip(runs, names, strict=True):
        recipe = repr(sorted(flat(run.config, skip=_SAME_RECIPE).items()))
        colour = recipes.setdefault(recipe, len(recipes))
        label = name if times[name] == 1 else run.id if ids[run.id] == 1 else str(run.path)
        shown.append(Shown(run, label, colour))
    return shown


def recipes_of(shown: Iterable[Shown]) -> list[list[Shown]]:
    """Return the runs of each recipe."""
    found: dict[int, list[Shown]] = defaultdict(list)
    for one in shown:
        found[one.colour].append(one)
    return [*found.values()]


def tabs(shown: Iterable[Shown], blocks: Callable[[Shown], list[Block]]) -> list[Tab]:
    """Return each run's own blocks."""
    return [Tab(one.label, blocks(one)) for one in shown]


def flat(tree: dict[str, Any], prefix: str = "", skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the values of a configuration by key path, without keys that begin with one of `skip`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{path}.", skip)
        elif not path.startswith(skip or ("\0",)):
            found[path] = value
    return found
