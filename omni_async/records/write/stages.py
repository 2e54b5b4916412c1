"""Follows the stages of a run from spans as they are reported: their seconds between updates, and the first of each."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from omni_async.types import Span

# How long after its last span a worker is remembered: its spans of a stage never overlap across that time.
_REMEMBERED_S = 86_400.0
# Stages are named by the kind of their spans, except `step` (an optimizer step) and `wait` (a starved trainer).
_STAGES = ("generate", "score", "proximal", "train", "step", "export", "publish", "wait")


class StageSeconds:
    """The seconds of each stage since the last `take`, summed over all its workers.

    Overlapping spans of one worker, such as samples of a batch, count once. A span counts when it is reported, within a
    second of its end: a long span counts for the update during which it ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        # Until when a worker's spans of a stage are counted.
        self._until: dict[tuple[str, str], float] = defaultdict(lambda: float("-inf"))

    def add(self, spans: Iterable[Span]) -> None:
        """Count spans; spans of one worker must be in the order of their ends."""
        for span in spans:
            stage = _stage(span)
            if stage in _STAGES:
                until = self._until[span.actor, stage]
                self._seconds[stage] += max(0.0, span.end - max(span.start, until))
                self._until[span.actor, stage] = max(until, span.end)

    def take(self) -> dict[str, float]:
        """Return the seconds of every stage that has any, as metrics, and reset them."""
        found = {f"stage_s/{stage}": self._seconds[stage] for stage in _STAGES if stage in self._seconds}
        self._seconds.clear()
        # Replacements have new names: without this, entries of replaced workers would accumulate.
        oldest = max(self._until.values(), default=0.0) - _REMEMBERED_S
        for key in [key for key, until in self._until.items() if until < oldest]:
            del self._until[key]
        return found


class FirstSamples:
    """Reports the phases before the first update, as the first samples of training groups pass the stages.

    `tell` receives a line for each phase. `scored`: whether samples have rewards."""

    def __init__(self, tell: Callable[[str], None], scored: bool) -> None:
        self._tell = tell
        self._phases = deque([("generate", "scoring the first samples")] if scored else [])
        self._phases.append(("score" if scored else "generate", "training begins with the first whole group"))

    def add(self, spans: Iterable[Span]) -> None:
        """Report each phase once, in order. A validation round reports its own end, so its samples do not count."""
        for span in spans:
            is_validation = str(span.args.get("sample", "")).startswith("v")
            if self._phases and span.kind == self._phases[0][0] and not is_validation:
                self._tell(self._phases.popleft()[1])


def _stage(span: Span) -> str:
    if span.kind == "train" and "step" in span.args:
        return "step"
    return "wait" if span.kind == "starved" and span.actor == "trainer" else span.kind
