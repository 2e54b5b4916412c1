"""Computes the Pareto front: what more staleness buys.

Nothing on it is slower and no fresher than something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.tune.trials import Point

# A point must be this much faster than every fresher one to be worth a row.
_WORTH = 0.005
_FRESHER = 0.05
_ROWS = 12


def front(points: Sequence[Point], chosen: Point) -> list[Point]:
    """Return the front, freshest first.

    Each point is faster than all before it whose staleness, mean and maximum, is no higher. `chosen` is always among
    them."""
    kept: list[Point] = []
    for point in sorted(points, key=_freshness):
        fresher = [
            other.images_per_s for other in kept if other.simulated.staleness_mean <= point.simulated.staleness_mean
        ]
        if not fresher or point.images_per_s > (1 + _WORTH) * max(fresher):
            kept.append(point)
    kept = [*(point for point in kept if not _same(point, chosen)), chosen]
    return sorted(_thinned(kept, chosen), key=lambda point: (point.images_per_s, point.simulated.staleness_mean))


def _freshness(point: Point) -> tuple[int, float, float]:
    return point.simulated.staleness_max, point.simulated.staleness_mean, -point.images_per_s


def _same(point: Point, chosen: Point) -> bool:
    """Return whether a point is as fast as the chosen one, and no fresher by more than chance."""
    as_fast = abs(point.images_per_s / chosen.images_per_s - 1) <= _WORTH
    fresher = point.simulated.staleness_mean <= chosen.simulated.staleness_mean - _FRESHER
    return as_fast and not fresher and point.simulated.staleness_max >= chosen.simulated.staleness_max


def _thinned(points: list[Point], chosen: Point) -> list[Point]:
    """Keep at most _ROWS points: as long as there are more, drops the one whose next faster neighbour is closest."""
    points = sorted(points, key=lambda point: point.images_per_s)
    while len(points) > _ROWS:
        gaps = [
            (points[i + 1].images_per_s / points[i].images_per_s, i)
            for i in range(len(points) - 1)
            if points[i] is not chosen
        ]
        del points[min(gaps)[1]]
    return points
