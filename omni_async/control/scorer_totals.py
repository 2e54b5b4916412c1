"""Adds up the work of the scorers of all reward workers, for metrics and `omni-async status`. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from omni_async.types import ScorerReport

# The current quantiles cover this many of the newest times.
_LAST_TIMES = 1000


class _Total:
    """One scorer's counts since the last update, and the newest times of its answers."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_LAST_TIMES)
        self.begin()

    def begin(self) -> None:
        self.counts = dict.fromkeys(("calls", "samples", "failed", "cached", "tokens"), 0.0)
        self.answer_s: list[float] = []
        self.call_s: list[float] = []

    def add(self, report: ScorerReport) -> None:
        for name in self.counts:
            self.counts[name] += getattr(report, name)
        self.answer_s += report.answer_s
        self.call_s += report.call_s
        self.recent.extend(report.answer_s)


class ScorerTotals:
    """The totals of every reported scorer, by its label."""

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}
        self._newest: dict[str, dict[str, ScorerReport]] = {}  # by worker and scorer
        self._since: dict[tuple[str, str], list[ScorerReport]] = defaultdict(list)  # the last call of `take`

    def add(self, worker: str, reports: Sequence[ScorerReport]) -> None:
        """Count the reports of a worker's scorers, the newest of each last."""
        self._newest[worker] = {one.scorer: one for one in reports}
        for one in reports:
            self._since[worker, one.scorer].append(one)
            self._totals.setdefault(one.scorer, _Total()).add(one)

    def forget(self, worker: str) -> None:
        """Stop counting the samples of a worker that has left."""
        self._newest.pop(worker, None)

    def _held(self, scorer: str) -> dict[str, float]:
        own = [reports[scorer] for reports in self._newest.values() if scorer in reports]
        return {"in_flight": sum(one.in_flight for one in own), "queued": sum(one.queued for one in own)}

    def _mean_held(self, scorer: str) -> dict[str, float]:
        """Return the mean numbers of samples in workers, from their reports since the last call of `take`."""
        own = [reports for (_, label), reports in self._since.items() if label == scorer]
        return {
            name: sum(fmean(getattr(one, name) for one in each) for each in own) for name in ("in_flight", "queued")
        }

    def take(self) -> dict[str, dict[str, float]]:
        """Return every scorer's numbers since the last call: counts, seconds per answer and per call, samples held.

        Seconds are quantiles, absent without answers; samples held are means."""
        found = {}
        for label, total in sorted(self._totals.items()):
            seconds = _quantiles("answer_s", total.answer_s) | _quantiles("call_s", total.call_s)
            found[label] = {**total.counts, **self._mean_held(label), **seconds}
            total.begin()
        self._since.clear()
        return found

    def now(self) -> dict[str, dict[str, Any]]:
        """Return every scorer's current samples, and the quantiles of its newest answers."""
        return {
            label: {**self._held(label), **_quantiles("answer_s", total.recent)}
            for label, total in sorted(self._totals.items())
        }


def _quantiles(name: str, times: Iterable[float]) -> dict[str, float]:
    ordered = sorted(times)
    if not ordered:
        return {}
    return {
        f"{name}/p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 95, 99)
    }
