"""Provides the formulas of docs/algorithms/correction.md, and settings and drifts to compare them with."""

import math

import torch
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.correction import Drift
from omni_async.config.algorithm import Correction, RejectLevels

WEIGHTED = Correction(mode="decoupled", weights="importance", cap=None)


def asked(**changes):
    return replace(WEIGHTED, **changes)


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_drift(seed, samples=6, steps=3, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = spread * torch.randn(samples, steps, dtype=torch.float64, generator=generator)
    return Drift(log_ratio, torch.rand(samples, steps, dtype=torch.float64, generator=generator))


def judged(statistic, level, accepts):
    """Returns the rows that a rule keeps, judged by step or over the steps of their sample."""
    if level == "step":
        return accepts(statistic)
    if level == "max":
        return accepts(statistic).all(1, keepdim=True).expand_as(statistic)
    one = statistic.sum(1, keepdim=True) if level == "sum" else statistic.mean(1, keepdim=True)
    return accepts(one).expand_as(statistic)


def weights_by_the_page(log_ratio, settings, num_elements, kept):
    exponent = log_ratio / (num_elements if settings.log_ratio == "mean" else 1)
    if settings.level != "step":
        per_step = settings.level == "trajectory" and settings.log_ratio == "mean"
        steps = [row[keeps] if settings.steps == "kept" else row for row, keeps in zip(exponent, kept, strict=True)]
        totals = [row.sum() / (max(len(row), 1) if per_step else 1) for row in steps]
        exponent = torch.stack(totals)[:, None].expand_as(exponent)
    low, high = settings.band or (0.0, math.inf)
    weights = [
        max(min(w, settings.cap or math.inf), settings.floor or 0.0) if low <= w <= high else 0.0
        for w in exponent.clamp(-20, 20).exp().flatten().tolist()
    ]
    return torch.tensor(weights, dtype=torch.float64).reshape(exponent.shape)


def without_idle_levels(chosen):
    """Returns the settings without levels of rules that are null, which are refused."""
    if isinstance(chosen.reject_level, str):
        return chosen
    idle = {rule: "step" for rule in ("k1", "k2", "k3") if getattr(chosen, rule) is None}
    return replace(chosen, reject_level=replace(chosen.reject_level, **idle))


LEVELS = ["step", "sum", "mean", "max"]
ONE_ROW_AT_A_TIME = st.builds(
    lambda level, **chosen: without_idle_levels(asked(level=level[0], log_ratio=level[1], **chosen)),
    st.sampled_from(
        [("step", "sum"), ("step", "mean"), ("trajectory", "sum"), ("trajectory", "mean"), ("sequence", "mean")]
    ),
    cap=st.sampled_from([None, 2.0]),
    floor=st.sampled_from([None, 0.7]),
    band=st.sampled_from([None, (0.5, 3.0)]),
    normalise=st.booleans(),
    kappa_nats=st.sampled_from([None, 0.6]),
    k1=st.sampled_from([None, (0.3, 4.0)]),
    k2=st.sampled_from([None, 1.0]),
    k3=st.sampled_from([None, 1.0]),
    reject_level=st.sampled_from(LEVELS)
    | st.builds(RejectLevels, k1=st.sampled_from(LEVELS), k3=st.sampled_from(LEVELS)),
    denominator=st.sampled_from(["kept", "all"]),
    steps=st.sampled_from(["all", "kept"]),
)


def level_of(chosen, rule):
    return chosen.reject_level if chosen.reject_level in LEVELS else getattr(chosen.reject_level, rule)


def by_the_page(drift, chosen, num_elements):
    """Returns weights before masks, and which rows are left, by the formulas of docs/algorithms/correction.md."""
    L = drift.log_ratio / (num_elements if chosen.log_ratio == "mean" else 1)
    kept = torch.ones_like(L, dtype=torch.bool)
    if chosen.kappa_nats is not None:
        kept &= drift.kappa <= chosen.kappa_nats
    if chosen.k1 is not None:
        low, high = map(math.log, chosen.k1)
        kept &= judged(L, level_of(chosen, "k1"), lambda value: (low <= value) & (value <= high))
    for rule, statistic in (("k2", L * L / 2), ("k3", L.exp() - 1 - L)):
        bound = getattr(chosen, rule)
        if bound is not None:
            kept &= judged(statistic, level_of(chosen, rule), lambda value: value <= bound)  # noqa: B023
    weight = weights_by_the_page(drift.log_ratio, chosen, num_elements, kept)
    return weight, kept & (weight > 0)
