"""Attributes an update's time, seen from the trainer: every moment belongs to exactly one category.

What the trainer does comes first. A moment in which it does nothing belongs to the first of these that is under way:
generation (on every engine, or as the `tail` of it on some), a shared device passing to another role, scoring, weights
on their way (with devices that have to pass to engines first); if none is, it is `idle`: messages, bookkeeping,
scheduling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from omni_async.tracking import timeline
from omni_async.tracking.timeline import Interval
from omni_async.types import Span
from omni_async.worker import Worker

# Category -> its name in reports.
CATEGORIES = {
    "training": "training",
    "recompute": "recomputed log-probs",
    "export": "weight export",
    "generation": "waiting for generation",
    "tail": "waiting for its tail",
    "switch": "devices changing hands",
    "reward": "waiting for rewards",
    "weights": "waiting for weights",
    "idle": "idle",
}
# Category -> the name of the gain where it shrinks.
_GAINS = CATEGORIES | {
    "generation": "generation overlapped",
    "tail": "tail",
    "reward": "reward wait",
    "weights": "weight-sync drain",
    "switch": "switching",
}
_WEIGHTS = ("publish", "stage", "swap")


def attribute(spans: Sequence[Span], start: float, end: float, engines: int) -> dict[str, float]:
    """Return the seconds of [start, end) per category.

    Args:
        spans: those of the run.
        start: in the clock's seconds, as in the spans.
        end: likewise.
        engines: how many there are, idle ones included."""
    trainer, engine_times, scoring, switching, weights = _sort(spans, start, end)
    claimed: list[Interval] = []

    def claim(times: Iterable[Interval]) -> float:
        nonlocal claimed
        before = timeline.length(claimed)
        claimed = timeline.union([*claimed, *times])
        return timeline.length(claimed) - before

    result = {
        "training": claim(trainer["train"]),
        "recompute": claim(trainer["proximal"]),
        "export": claim(trainer["export"]),
        "generation": claim(timeline.at_least(engines, engine_times)),
        "tail": claim(interval for times in engine_times for interval in times),
        "switch": claim(switching),
        "reward": claim(scoring),
        "weights": claim(weights),
    }
    return {**result, "idle": max(0.0, end - start - timeline.length(claimed))}


def _sort(
    spans: Sequence[Span], start: float, end: float
) -> tuple[dict[str, list[Interval]], list[list[Interval]], list[Interval], list[Interval], list[Interval]]:
    """Return the times inside [start, end): the trainer's by kind, each engine's, scoring, switching, weights."""
    trainer: dict[str, list[Interval]] = defaultdict(list)
    engines: dict[str, list[Interval]] = defaultdict(list)
    scoring: list[Interval] = []
    switching: list[Interval] = []
    weights: list[Interval] = []
    for span in spans:
        inside = timeline.clip([(span.start, span.end)], start, end)
        if span.kind == "generate":
            engines[span.actor] += inside
        elif span.kind == "score":
            scoring += inside
        elif span.kind == "switch":
            switching += inside
        elif span.kind in _WEIGHTS:
            weights += inside
        elif Worker.parse(span.actor).role == "trainer":
            trainer[span.kind] += inside
    return trainer, list(engines.values()), scoring, switching, weights


def differences(baseline: Mapping[str, float], arm: Mapping[str, float]) -> dict[str, float]:
    """Return each category's share of the seconds by which the arm is faster; the shares sum to 1.

    A negative share is a category that takes the arm longer. Empty where both are equally fast."""
    saved = sum(baseline.values()) - sum(arm.values())
    if abs(saved) < 1e-9:
        return {}
    return {name: (baseline[name] - arm[name]) / saved for name in CATEGORIES}


def in_words(ratio: float, baseline_name: str, baseline: Mapping[str, float], arm: Mapping[str, float]) -> str:
    """Phrase a speed-up: `1.62x over sync: generation overlapped 60 %, reward wait 31 %, tail 9 %`.

    Shares below 1 % are left out, and all of a difference that is below 1 % of the baseline's step."""
    text = f"{ratio:.2f}x over {baseline_name}"
    saved = sum(baseline.values()) - sum(arm.values())
    if abs(saved) < 0.01 * sum(baseline.values()):
        return text
    shares = sorted(differences(baseline, arm).items(), key=lambda item: -abs(item[1]))
    parts = [f"{_GAINS[name]} {share:.0%}".replace("%", " %") for name, share in shares if abs(share) >= 0.01]
    if not parts:
        return text
    return f"{text}: {', '.join(parts)}" if saved > 0 else f"{text}; of what it loses: {', '.join(parts)}"
