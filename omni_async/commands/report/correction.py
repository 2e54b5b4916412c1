"""Shows how far the policy in training is from the policy behind the data, and the effect of the correction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from omni_async.algorithms.mismatch import CLIPPED_AT_MOST, DRIFTED_AT_MOST, Mismatch
from omni_async.commands.report.blocks import (
    Axis,
    Block,
    Chart,
    Mark,
    Section,
    Series,
    Text,
    series,
    thin,
    thinning_note,
)
from omni_async.commands.report.seeds import with_bands
from omni_async.commands.report.shown import Shown, axes, positions, tabs
from omni_async.types import finite


class _Diagnostic(NamedTuple):
    key: str
    title: str
    unit: str
    hint: str
    low: float | None = None
    high: float | None = None


_DIAGNOSTICS = (
    _Diagnostic(
        "ess", "Effective sample size", "fraction", "1 is on-policy; near 0 few rows carry all the weight.", 0, 1
    ),
    _Diagnostic(
        "log_ratio_nats/variance",
        "Drift, variance of the log-ratio",
        "nats²",
        "Grows with staleness and step size; beyond about 1 importance weights say little.",
    ),
    _Diagnostic(
        "log_ratio_nats/mean",
        "Drift, mean log-ratio",
        "nats",
        "Of a whole sample, from the policy that took its steps to the policy in training.",
    ),
    _Diagnostic("log_ratio_nats/absmax", "Drift, largest log-ratio", "nats", "The row that drifted most."),
    _Diagnostic("kappa_nats", "Drift as an exact KL", "nats", "The same drift without sampling noise."),
    _Diagnostic("k3_nats", "Drift as an estimated KL", "nats", "The same, estimated from log-ratios.", 0),
    _Diagnostic(
        "clip_fraction",
        "Clipped rows",
        "fraction",
        "Rows outside the clip range: they do not push further. Above a half, steps or staleness are large.",
        0,
    ),
    _Diagnostic(
        "drift_clipped",
        "Rows clipped by drift",
        "fraction",
        "Rows outside the clip range before the update moves them. Mode auto leaves bypass above the mark.",
        0,
        1,
    ),
    _Diagnostic("masked", "Masked rows", "fraction", "Rows that the off-policy correction leaves out.", 0, 1),
    _Diagnostic("weight/mean", "Importance weight, mean", "", "Near 1 where the correction has little to do."),
    _Diagnostic("weight/max", "Importance weight, largest", "", "One row that counts as much as many."),
    _Diagnostic("gamma", "Exponent of tempered weights", "", "1 leaves the weights as they are.", 0, 1),
    _Diagnostic(
        "engine_mismatch_nats",
        "Mismatch of engine and trainer",
        "nats",
        "The largest log-ratio of rows of staleness 0, which both compute with the same weights.",
    ),
    _Diagnostic(
        "engine_mismatch_velocity",
        "Mismatch as a velocity error",
        "fraction",
        "What those log-ratios imply, relative to the velocity. It does not grow with the resolution.",
        0,
    ),
    _Diagnostic(
        "engine_mismatch_clipped",
        "Rows clipped before any update",
        "fraction",
        "Fresh rows outside the clip range: the mismatch alone puts them there.",
        0,
        1,
    ),
    _Diagnostic("approx_kl", "Step size, approximate KL", "", "How far one update moved the policy on its own data."),
    _Diagnostic(
        "kl_ref", "KL to the reference policy", "", "How far the policy is from the model that training began with."
    ),
    _Diagnostic("grad_norm", "Gradient norm", "", "Before clipping; spikes come with large drift or a broken reward."),
)
_LIMITS = {"engine_mismatch_clipped": CLIPPED_AT_MOST, "drift_clipped": DRIFTED_AT_MOST}
_MOST_STEPS = 128
_PER_STEP = re.compile(r"(?P<name>.+)/step_(?P<step>\d+)")
_STEP_TITLES = {
    "log_ratio_nats/variance": ("Drift per denoising step", "nats²"),
    "engine_mismatch_nats/mean": ("Mismatch of engine and trainer per denoising step, mean", "nats"),
    "engine_mismatch_nats/variance": ("Mismatch of engine and trainer per denoising step, variance", "nats²"),
    "ess": ("Effective sample size per denoising step", "fraction"),
    "gamma": ("Exponent of tempered weights per denoising step", ""),
    "kappa_nats": ("Exact KL per denoising step", "nats"),
    "weight/mean": ("Importance weight per denoising step", ""),
    "masked": ("Masked rows per denoising step", "fraction"),
}


def correction(shown: Sequence[Shown]) -> Section:
    """Return the section of the drift's diagnostics, all runs in each chart."""
    lead = "Off-policy data are fine while the policies stay close. These say how close they are."
    sentences = [
        sentence for run in shown for sentence in (_at_the_start(run), _left_bypass(run)) if sentence is not None
    ]
    blocks: list[Block] = [Text(sentence) for sentence in sentences]
    for one in _DIAGNOSTICS:
        curves = with_bands([run for run in shown if run.has(one.key)], lambda run: run.points(one.key))  # noqa: B023
        if any(curve.y for curve in curves):
            y = Axis("", one.unit, one.low, one.high)
            marks = [Mark("warning", _LIMITS[one.key])] if one.key in _LIMITS else []
            note = thinning_note(curves)
            blocks.append(
                Chart(
                    f"metric-{one.key.replace('/', '-')}",
                    one.title,
                    one.hint,
                    axes(),
                    y,
                    curves,
                    marks=marks,
                    note=note,
                )
            )
    if not blocks:
        blocks = [Text("This objective records no drift, or there is no update yet.", tone="nothing")]
    return Section("correction", "Drift and correction", lead, blocks)


def _at_the_start(one: Shown) -> str | None:
    """Return a run's first mismatch next to its drift, in words; None if it recorded none."""
    updates = [_numbers(line) for line in one.run.updates]
    found = next((found for line in updates if (found := Mismatch.of(line)) is not None), None)
    if found is None:
        return None
    stale = [line for line in updates if line.get("fresh_fraction") == 0]
    drifts = [abs(line["log_ratio_nats/variance"]) for line in stale if "log_ratio_nats/variance" in line]
    drift = f"; stale rows drift by {fmean(drifts) ** 0.5:.2g} nats" if drifts else ""
    return f"{one.label}: engine and trainer under the same weights: {found.shown}{drift}."


def _left_bypass(one: Shown) -> str | None:
    """Return when mode `auto` left `bypass`, in words; None if it did not."""
    left = next((line for line in map(_numbers, one.run.updates) if line.get("proximal_ratio") == 1), None)
    if left is None:
        return None
    weights = " with tempered weights" if "gamma" in left else ""
    return f"{one.label}: correction.mode auto is decoupled{weights} from update {left.get('update', 0):.0f} on."


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: number for name, value in line.items() if (number := finite(value)) is not None}


def steps(shown: Sequence[Shown]) -> Section:
    """Return the section with every denoising step's contribution to the drift."""
    lead = "Late steps, of low noise, tend to drift most: a window that leaves them out keeps data usable longer."
    if not any(_steps_of(one) for one in shown):
        return Section("steps", "Drift per denoising step", blocks=[Text("No denoising step was measured.", "nothing")])
    return Section("steps", "Drift per denoising step", lead, tabs=tabs(shown, _per_step))


def _steps_of(one: Shown) -> dict[str, list[str]]:
    """Return name -> keys of its steps, in their order."""
    keys = sorted({key for line in one.run.updates for key in line if "/step_" in key})[:_MOST_STEPS]
    found: dict[str, list[str]] = {}
    for key in keys:
        if (match := _PER_STEP.fullmatch(key)) is not None:
            found.setdefault(match["name"], []).append(key)
    return found


def _per_step(one: Shown) -> list[Block]:
    blocks: list[Block] = []
    for name, keys in _steps_of(one).items():
        title, unit = _STEP_TITLES.get(name, (f"{name} per denoising step", ""))
        curves = [_step_curve(one, key, number / max(1, len(keys) - 1)) for number, key in enumerate(keys)]
        hint = "A curve per denoising step; a step has no point in updates whose window left it out."
        y = Axis("", unit)
        blocks.append(
            Chart(f"step-{name.replace('/', '-')}", title, hint, axes(), y, curves, note=thinning_note(curves))
        )
    return blocks or [Text("No denoising step was measured.", "nothing")]


def _step_curve(one: Shown, key: str, shade: float) -> Series:
    lines = [line for line in one.run.updates if key in line]
    values = [line[key] for line in lines]
    return thin(series(f"step {int(key.rpartition('_')[2])}", positions(lines), values, colour=f"age-{shade:.3f}"))
