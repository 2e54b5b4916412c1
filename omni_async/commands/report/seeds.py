"""Draws and names runs of one recipe with different seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from omni_async.commands.report.blocks import Series, thin
from omni_async.commands.report.shown import Shown, recipes_of
from omni_async.types import finite


def seeds_of(runs: Sequence[Shown]) -> str:
    """Format `3 seeds`, or `3 runs` if some have the same seed."""
    seeds = {str(one.run.setting("run.seed")) for one in runs}
    return f"{len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}"


def with_bands(shown: Sequence[Shown], points: Callable[[Shown], Series]) -> list[Series]:
    """Return the runs' curves; curves of several seeds of a recipe are faint, under their mean with its range.

    `points` returns all points of a run, because a mean of thinned points would cover few updates, and mostly extremes.
    """
    curves_: list[Series] = []
    for runs in recipes_of(shown):
        own = [points(one) for one in runs]
        if len(own) == 1:
            curves_ += map(thin, own)
            continue
        faint = [thin(replace(one, low=None, high=None, faint=True)) for one in own]
        curves_ += [*faint, thin(_mean(own, f"{runs[0].run.setting('run.name', 'recipe')}, mean of {seeds_of(runs)}"))]
    return curves_


def _mean(curves_: Sequence[Series], name: str) -> Series:
    """Return the mean of the curves at updates that all of them have, with the range as its band."""
    at: dict[float, list[float]] = defaultdict(list)
    minutes: dict[float, list[float]] = defaultdict(list)
    for one in curves_:
        for update, minute, value in zip(one.x["update"], one.x["minutes"], one.y, strict=True):
            if (found := finite(value)) is not None:
                at[update].append(found)
                minutes[update].append(minute)
    updates = sorted(update for update, values in at.items() if len(values) == len(curves_))
    return Series(
        name,
        {"update": updates, "minutes": [sum(minutes[one]) / len(curves_) for one in updates]},
        [sum(at[one]) / len(curves_) for one in updates],
        low=[min(at[one]) for one in updates],
        high=[max(at[one]) for one in updates],
        colour=curves_[0].colour,
    )
