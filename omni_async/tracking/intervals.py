"""Computes with sets of time, as sorted, disjoint half-open intervals."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as sorted disjoint intervals; empty and reversed ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts inside [start, end)."""
    return [(max(a, start), min(b, end)) for a, b in intervals if max(a, start) < min(b, end)]


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def at_least(count: int, sets: Iterable[Iterable[Interval]]) -> list[Interval]:
    """Return where at least `count` of the sets hold; each set is united first, so its own overlaps count once."""
    edges = sorted(edge for members in sets for start, end in union(members) for edge in ((start, 1), (end, -1)))
    result: list[Interval] = []
    depth, opened = 0, 0.0
    for time, step in edges:
        if step > 0 and depth + 1 == count:
            opened = time
        elif step < 0 and depth == count and opened < time:
            result.append((opened, time))
        depth += step
    return union(result)
