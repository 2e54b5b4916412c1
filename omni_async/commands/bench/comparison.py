"""Compares the runs of every arm: medians over repeats, predictions, seconds saved per update and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

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
# Category -> the cause of seconds saved if it shrinks.
CAUSES = CATEGORIES | {
    "generation": "generation overlapped with training",
    "tail": "tail of generation overlapped",
    "reward": "scoring overlapped",
    "weights": "weight transfer overlapped",
    "switch": "devices changing hands less often",
    "idle": "not attributed: no role was active",
}
# Categories that are waits of the trainer for a role that is active.
WAITS = ("generation", "tail", "switch", "reward", "weights")


class Cause(msgspec.Struct, frozen=True):
    """Seconds per update of one category in the baseline and in the arm; `saved_s` < 0 if the arm needs more."""

    category: str
    name: str
    before_s: float
    after_s: float
    saved_s: float


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds per update that an arm saves over a baseline, and their causes.

    - `arm`, `baseline`: their names.
    - `ratio`, `saved_s`: of the step times of the same round, over the `rounds` that both finished.
    - `round`: the round with the median ratio (the lower of two); `before_s`, `after_s` and `causes` are this round's.
    - `causes`: a cause per category; their `saved_s` sum to before_s - after_s."""

    arm: str
    baseline: str
    ratio: Spread
    saved_s: Spread
    rounds: int
    round: int
    before_s: float
    after_s: float
    causes: list[Cause]


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
    tokens_per_s: Spread | None


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
    tokens = [run.tokens_per_s for run in runs if run.tokens_per_s is not None]
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
        tokens_per_s=spread(tokens) if tokens else None,
    )


def _speedup(arm: ArmRecord, baseline: ArmRecord, rounds: Collection[int]) -> Speedup:
    pairs = {number: (baseline.measured[number], arm.measured[number]) for number in rounds}
    ratios = {number: before.step_s / after.step_s for number, (before, after) in pairs.items()}
    shown = sorted(ratios, key=lambda number: (ratios[number], number))[(len(ratios) - 1) // 2]
    before, after = pairs[shown]
    return Speedup(
        arm=arm.name,
        baseline=baseline.name,
        ratio=spread([*ratios.values()]),
        saved_s=spread([before.step_s - after.step_s for before, after in pairs.values()]),
        rounds=len(pairs),
        round=shown,
        before_s=before.step_s,
        after_s=after.step_s,
        causes=causes(before, after),
    )


def causes(before: Measured, after: Measured) -> list[Cause]:
    """Attribute the difference between two runs' seconds per update; the causes sum to it, largest saving first."""
    seconds = [_attributed(run) for run in (before, after)]
    found = []
    for category in CATEGORIES:
        was, remains = (own[category] for own in seconds)
        name = CAUSES[category] if was >= remains else f"{CATEGORIES[category]}, longer"
        found.append(Cause(category, name, was, remains, was - remains))
    return sorted(found, key=lambda cause: -cause.saved_s)


def _attributed(run: Measured) -> dict[str, float]:
    """Return the seconds of an update by category; `idle` is all that no other category contains."""
    rest = run.step_s - sum(run.attribution[name] for name in CATEGORIES if name != "idle")
    return run.attribution | {"idle": rest}


def answer(summaries: dict[str, ArmSummary]) -> Speedup | None:
    """Return the speed-up of the fastest arm over the synchronous one, or over the first other baseline.

    A baseline is the arm only if no other arm shares a round with a baseline. None without two arms to compare."""
    candidates = [
        (name in BASELINES, BASELINES.index(base), arm.step_s.median, name, base)
        for name, arm in summaries.items()
        for base in arm.speedups
    ]
    if not candidates:
        return None
    *_, name, base = min(candidates)
    return summaries[name].speedups[base]
