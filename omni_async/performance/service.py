"""Describes service times: how long one device is busy with one job of n units, as numbers that fit into a profile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]

# Enough to keep a tail that one job in fifty belongs to.
_NUM_QUANTILES = 50
# Tolerance of the mean of quantiles that were rounded.
_FAR_FROM_1 = 0.01


class ServiceTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of a job: n units take (fixed_s + n * unit_s) * f seconds, with a random factor f of mean 1.

    `quantiles` of f, at the probabilities (i + 1/2) / len, say how it is distributed; without them it is log-normal
    with standard deviation `cv`; with cv = 0 it is 1."""

    fixed_s: Seconds = 0.0
    unit_s: Seconds = 0.0
    cv: Seconds = 0.0
    quantiles: tuple[Seconds, ...] = ()

    def __post_init__(self) -> None:
        if self.quantiles and abs(sum(self.quantiles) / len(self.quantiles) - 1) > _FAR_FROM_1:
            raise ValueError(f"quantiles: their mean should be 1, got {sum(self.quantiles) / len(self.quantiles):.4g}")

    def mean(self, units: float = 1) -> float:
        """Return the mean seconds of a job of `units`; 0 for no units."""
        return self.fixed_s + units * self.unit_s if units > 0 else 0.0

    def sampler(self, random: random.Random) -> Callable[[float], float]:
        """Return a function that draws the seconds of one job of so many units."""
        fixed, unit, quantiles = self.fixed_s, self.unit_s, self.quantiles
        if quantiles:
            return lambda units: (fixed + units * unit) * random.choice(quantiles) if units > 0 else 0.0
        if self.cv == 0:
            return self.mean
        variance = math.log1p(self.cv**2)
        mu, sigma = -variance / 2, math.sqrt(variance)
        return lambda units: (fixed + units * unit) * math.exp(random.gauss(mu, sigma)) if units > 0 else 0.0

    @property
    def variation(self) -> float:
        """The coefficient of variation of f (std / mean)."""
        if not self.quantiles:
            return self.cv
        mean = sum(self.quantiles) / len(self.quantiles)
        return math.sqrt(sum((q - mean) ** 2 for q in self.quantiles) / len(self.quantiles)) / mean if mean > 0 else 0.0

    def scaled(self, factor: float) -> ServiceTime:
        """Return the same jobs on a device 1 / factor times as fast."""
        return msgspec.structs.replace(self, fixed_s=self.fixed_s * factor, unit_s=self.unit_s * factor)


NOTHING = ServiceTime()


def fit(jobs: Sequence[tuple[float, float]]) -> ServiceTime:
    """Fit the service time behind observed jobs (units, seconds).

    By least squares fixed_s and unit_s, both >= 0, and the quantiles of each job's seconds relative to that, scaled to
    mean 1. Jobs of one size give unit_s alone."""
    jobs = [(units, seconds) for units, seconds in jobs if units > 0 and seconds >= 0]
    if not jobs:
        return NOTHING
    count, sum_n, sum_s = len(jobs), sum(n for n, _ in jobs), sum(s for _, s in jobs)
    mean_n, mean_s = sum_n / count, sum_s / count
    spread = sum((n - mean_n) ** 2 for n, _ in jobs)
    slope = sum((n - mean_n) * (s - mean_s) for n, s in jobs) / spread if spread > 0 else sum_s / sum_n
    fixed, unit = mean_s - slope * mean_n, slope
    if spread == 0 or fixed < 0:
        fixed, unit = 0.0, sum_s / sum_n
    elif unit < 0:
        fixed, unit = mean_s, 0.0
    expected = [fixed + n * unit for n, _ in jobs]
    factors = sorted(s / e for (_, s), e in zip(jobs, expected, strict=True) if e > 0)
    if len(factors) < 2 or factors[0] == factors[-1]:
        return ServiceTime(fixed, unit)
    chosen = [factors[int((i + 0.5) / _NUM_QUANTILES * len(factors))] for i in range(_NUM_QUANTILES)]
    mean = sum(chosen) / len(chosen)
    if mean == 0:  # all but a few took no time at all
        return ServiceTime(fixed, unit)
    return ServiceTime(fixed, unit, quantiles=tuple(round(f / mean, 4) for f in chosen))
