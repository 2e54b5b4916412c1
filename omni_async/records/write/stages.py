"""Adds up how long the stages of a run took from update to update, of spans as they are reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from omni_async.types import Span

# For how long after its last span a worker is remembered: its spans of a stage do not overlap over such a time.
_REMEMBERED_S = 86_400.0
# What a stage is called where that is not the kind of its spans: waits are told apart by who waits.
_STAGES = ("generate", "score", "proximal", "train", "step", "export", "publish", "wait")


class StageSeconds:
    """The seconds of each stage since they were last taken, of all its workers together.

    Spans of one worker that overlap, samples of a batch say, count once. A span counts when it is reported, within a
    second of its end: a long one counts for the update in which it ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        # Until when a worker's spans of a stage are counted.
        self._until: dict[tuple[str, str], float] = defaultdict(lambda: float("-inf"))

    def add(self, spans: Iterable[Span]) -> None:
        """Count spans, those of one worker in the order in which they ended."""
        for span in spans:
            stage = _stage(span)
            if stage in _STAGES:
                until = self._until[span.actor, stage]
                self._seconds[stage] += max(0.0, span.end - max(span.start, until))
                self._until[span.actor, stage] = max(until, span.end)

    def take(self) -> dict[str, float]:
        """Return the seconds of every stage that has any, as metrics, and begin anew."""
        found = {f"stage_s/{stage}": self._seconds[stage] for stage in _STAGES if stage in self._seconds}
        self._seconds.clear()
        # Workers that were replaced had names of their own.
        oldest = max(self._until.values(), default=0.0) - _REMEMBERED_S
        for key in [key for key, until in self._until.items() if until < oldest]:
            del self._until[key]
        return found


def _stage(span: Span) -> str:
    if span.kind == "train" and "step" in span.args:
        return "step"
    return "wait" if span.kind == "starved" and span.actor == "trainer" else span.kind
