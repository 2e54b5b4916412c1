"""Describes a run in five facts: its algorithm, model and reward, the staleness of its data, and its slowest stage."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from omni_async.commands.report.blocks import Fact, Facts
from omni_async.commands.report.shown import Shown
from omni_async.commands.report.staleness import ages_of
from omni_async.commands.report.waiting import STAGES, shares_from, slowest
from omni_async.config.redact import redact_text
from omni_async.types import finite

_LONGEST = 60  # characters of a name
_UNKNOWN = "-"


def setup(one: Shown) -> Facts:
    """Return the facts of a run, in the order of a recipe."""
    return Facts([_algorithm(one), _model(one), _reward(one), _staleness(one), _bottleneck(one)], compact=True)


def _algorithm(one: Shown) -> Fact:
    groups, samples = one.run.setting("trainer.groups_per_update"), one.run.setting("rollout.group_size")
    known = isinstance(groups, int) and isinstance(samples, int)
    sizes = f"{groups} groups of {samples} samples per update" if known else ""
    return Fact("algorithm", _name(one.run.setting("algorithm.name")), sizes)


def _model(one: Shown) -> Fact:
    path = one.run.setting("model.path")
    detail = _name(path) if isinstance(path, str) else ""
    if one.is_emulated:
        detail = "not loaded: emulated"
    return Fact("model", _name(one.run.setting("model.pipeline")), detail)


def _reward(one: Shown) -> Fact:
    scorers = one.run.setting("reward.scorers")
    named = [each for each in scorers if isinstance(each, dict)] if isinstance(scorers, list | tuple) else []
    if not named:
        other = "preference pairs" if one.run.setting("data.preferences") else _UNKNOWN
        return Fact("reward", "a teacher" if one.run.setting("algorithm.teacher") else other)
    names = [_name(each.get("name")) for each in named]
    sign = " × " if one.run.setting("reward.combine") == "product" else " + "
    weights = [finite(each.get("weight", 1)) for each in named]
    shown = ", ".join("-" if weight is None else f"{weight:g}" for weight in weights)
    detail = f"weights {shown}"[:_LONGEST] if {*weights} != {1.0} else ""
    if one.is_emulated:
        detail = "not called: emulated"
    return Fact("reward", sign.join(names)[: 2 * _LONGEST], detail)


def _staleness(one: Shown) -> Fact:
    ages = [age for _, age in ages_of(one)]
    used = f"used: {sum(ages) / len(ages):.2f} on average, {max(ages)} at most" if ages else "no group was trained"
    budget = one.run.setting("staleness.max_updates")
    return Fact("staleness", f"S = {budget}" if isinstance(budget, int) else _UNKNOWN, used)


def _bottleneck(one: Shown) -> Fact:
    return bottleneck(_shares(one), one.run.setting("staleness.max_updates"))


def bottleneck(shares: Mapping[str, Mapping[str, float]], budget: Any) -> Fact:
    """Return the slowest stage, and how busy each is; the arguments are those of `slowest`."""
    busy = [f"{stage} {shares[role]['busy']:.0%}" for role, stage in STAGES.items() if role in shares]
    found = slowest(shares, budget)
    return Fact("bottleneck", found.stage, f"busy: {', '.join(busy)}" if busy else found.why)


def _shares(one: Shown) -> Mapping[str, Mapping[str, float]]:
    """Return role -> state -> share of the time: the summary's, or without one, estimates from the updates' metrics."""
    if one.run.summary is not None:
        return {role: states for role, states in one.run.summary.busy.items() if "busy" in states}
    found = {}
    for role in STAGES:
        busy = [value for line in one.run.updates if (value := finite(line.get(f"busy/{role}"))) is not None]
        if busy:
            found[role] = median(busy)
    return shares_from(found)


def _name(value: Any) -> str:
    """Return a name of the configuration; of a path, its last part. Credentials are masked first: they may have a /."""
    if not isinstance(value, str) or not value:
        return _UNKNOWN
    return redact_text(value).rstrip("/").rpartition("/")[2][:_LONGEST]
