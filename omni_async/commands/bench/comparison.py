"""Compares the runs of every arm: medians over repeats, predictions next to them, speed-ups and their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from omni_async.commands.bench.plan import BASELINES
from omni_async.commands.bench.result import ArmRecord, Measured, Overlap, Spread, Stage, spread

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
# Category -> the name of the gain if it shrinks.
_GAINS = CATEGORIES | {
    "generation": "generation overlapped",
    "tail": "tail",
    "reward": "reward wait",
    "weights": "weight-sync drain",
    "switch": "switching",
}


class Speedup(msgspec.Struct, frozen=True):
    """A speed-up over a baseline: `ratio` of the step times of the same round, over rounds.

    `shares`: category -> its part of the seconds saved."""

    ratio: Spread
    shares: dict[str, float]
    words: str


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An arm's numbers over its repeats; seconds are measured ones.

    `attribution`, `stages` and `busy` come from the repeat with the median step time, so that they belong together;
    `staleness` is the sum of all."""

    name: str
    runs: int
    devices: float
    step_s: Spread
    images_per_s: Spread
    images_per_s_per_device: Spread
    law_s: float | None
    bound_fraction: float | None
    simulated_s: float | None
    deviation: float | None
    attribution: dict[str, float]
    stages: dict[str, Stage]
    busy: dict[str, dict[str, float]]
    staleness: dict[int, int]
    staleness_mean: float
    staleness_max: int
    peak_memory_bytes: int | None
    speedups: dict[str, Speedup]


def compare(overlap: Overlap) -> dict[str, ArmSummary]:
    """Summarize each arm, in the benchmark's order; arms without a measured run are left out.

    `deviation` = simulated / measured - 1."""
    measured = {arm.name: arm for arm in overlap.arms if arm.measured}
    return {name: _summary(arm, measured) for name, arm in measured.items()}


def median_run(arm: ArmRecord) -> Measured:
    """Return the repeat with the median step time (the faster of two)."""
    runs = sorted(arm.measured.values(), key=lambda run: run.step_s)
    return runs[(len(runs) - 1) // 2]


def _summary(arm: ArmRecord, others: dict[str, ArmRecord]) -> ArmSummary:
    runs, shown = list(arm.measured.values()), median_run(arm)
    step = spread([run.step_s for run in runs])
    staleness: Counter[int] = sum((Counter(run.staleness) for run in runs), Counter())
    law, simulated = (arm.prediction.law_s, arm.prediction.simulated_s) if arm.prediction else (None, None)
    memory = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return ArmSummary(
        name=arm.name,
        runs=len(runs),
        devices=arm.devices or 0.0,
        step_s=step,
        images_per_s=spread([run.images_per_s for run in runs]),
        images_per_s_per_device=spread([run.images_per_s_per_device for run in runs]),
        law_s=law,
        bound_fraction=law / step.median if law is not None else None,
        simulated_s=simulated,
        deviation=simulated / step.median - 1 if simulated is not None else None,
        attribution=shown.attribution,
        stages=shown.stages,
        busy=shown.busy,
        staleness=dict(sorted(staleness.items())),
        staleness_mean=sum(age * count for age, count in staleness.items()) / max(1, staleness.total()),
        staleness_max=max(staleness, default=0),
        peak_memory_bytes=max(memory, default=None),
        speedups={
            name: _speedup(arm, others[name], rounds)
            for name in BASELINES
            if name in others and name != arm.name and (rounds := arm.measured.keys() & others[name].measured.keys())
        },
    )


def _speedup(arm: ArmRecord, baseline: ArmRecord, rounds: Collection[int]) -> Speedup:
    ratio = spread([baseline.measured[number].step_s / arm.measured[number].step_s for number in sorted(rounds)])
    before, after = median_run(baseline).attribution, median_run(arm).attribution
    return Speedup(ratio, differences(before, after), in_words(ratio.median, baseline.name, before, after))


def fastest(summaries: dict[str, ArmSummary]) -> ArmSummary | None:
    """Return the arm with the shortest step, baselines excluded."""
    candidates = [summary for name, summary in summaries.items() if name not in BASELINES]
    return min(candidates, key=lambda summary: summary.step_s.median, default=None)


def differences(baseline: Mapping[str, float], arm: Mapping[str, float]) -> dict[str, float]:
    """Return each category's share of the seconds that the arm saves; the shares sum to 1.

    A negative share is a category that takes longer in the arm. Empty if both are equally fast."""
    saved = sum(baseline.values()) - sum(arm.values())
    if abs(saved) < 1e-9:
        return {}
    return {name: (baseline[name] - arm[name]) / saved for name in CATEGORIES}


def in_words(ratio: float, baseline_name: str, baseline: Mapping[str, float], arm: Mapping[str, float]) -> str:
    """Phrase a speed-up: `1.62x over sync: generation overlapped 60 %, reward wait 31 %, tail 9 %`.

    Omits shares below 1 %, and all shares if the difference is below 1 % of the baseline's step.

    Args:
        ratio: the baseline's step over the arm's.
        baseline_name: the baseline of the comparison.
        baseline, arm: seconds of a step, by category."""
    text = f"{ratio:.2f}x over {baseline_name}"
    saved = sum(baseline.values()) - sum(arm.values())
    if abs(saved) < 0.01 * sum(baseline.values()):
        return text
    shares = sorted(differences(baseline, arm).items(), key=lambda item: -abs(item[1]))
    parts = [f"{_GAINS[name]} {share:.0%}".replace("%", " %") for name, share in shares if abs(share) >= 0.01]
    if not parts:
        return text
    return f"{text}: {', '.join(parts)}" if saved > 0 else f"{text}; of what it loses: {', '.join(parts)}"
