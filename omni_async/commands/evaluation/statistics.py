"""Compares models by rewards of samples whose prompts they share: means, intervals, paired tests. Pure functions.

Samples of one prompt resemble each other: a hard prompt is hard for all of them. Only prompts are independent, so every
number here counts prompts and not samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

LEVEL = 0.95
_EXACT = 16  # largest number of prompts for which all 2 ** n signs are tried
_DRAWS = 100_000  # random signs for more prompts
_CHUNK = 10_000


class Estimate(Struct, frozen=True):
    """A mean over `samples` samples of `prompts` prompts, with its standard error and the ends of its interval.

    The standard error and the interval are None with fewer than two prompts."""

    mean: float
    se: float | None
    low: float | None
    high: float | None
    samples: int
    prompts: int


def clustered_mean(values: ArrayLike, prompts: Sequence[int], level: float = LEVEL) -> Estimate:
    """Return the mean over samples, with an interval that counts the samples of a prompt as one observation.

    The standard error is the cluster-robust one (Liang and Zeger 1986, doi:10.1093/biomet/73.1.13) for n samples of G
    prompts, as Miller 2024 (arXiv 2411.00640, section 2.2) uses it for evaluations:

        se^2 = G / (G - 1) * sum over prompts of (sum of (x - mean) over the prompt's samples)^2 / n^2

    The factor for few clusters and the t distribution of G - 1 degrees of freedom follow Cameron and Miller 2015
    (doi:10.3368/jhr.50.2.317, sections II.C and VI). With one sample per prompt it is the usual standard error of a
    mean.

    Args:
        values: (n,) finite numbers, n >= 1.
        prompts: (n,) the prompt of each.
        level: the interval's coverage.

    Raises:
        ValueError: there are no values, or not one prompt for each."""
    x, sums = _residuals(values, prompts)
    mean, (count, clusters) = float(x.mean()), (len(x), len(sums))
    if clusters < 2:
        return Estimate(mean, None, None, None, count, clusters)
    se = math.sqrt(clusters / (clusters - 1) * float(np.square(sums).sum())) / count
    half = float(stdtrit(clusters - 1, (1 + level) / 2)) * se
    return Estimate(mean, se, mean - half, mean + half, count, clusters)


def _residuals(values: ArrayLike, prompts: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values, and for every prompt the sum of its samples' differences from the mean."""
    x = np.asarray(values, np.float64)
    if not len(x) or len(x) != len(prompts):
        raise ValueError(f"expected a prompt for each of at least one value, got {len(x)} and {len(prompts)}")
    return x, _sums(x - x.mean(), prompts)


def _sums(x: NDArray[np.float64], prompts: Sequence[int]) -> NDArray[np.float64]:
    """Return the sum of each prompt's values, in the order of the prompts' numbers."""
    _, cluster = np.unique(np.asarray(prompts), return_inverse=True)
    return np.bincount(cluster, weights=x).astype(np.float64)


class Paired(Struct, frozen=True):
    """The difference of a model from another on their shared samples, and how likely chance makes it as large.

    `p` is two-sided, None without shared samples; `exact`: from all signs rather than random ones; `p_holm`: `p`
    corrected for the number of compared models, initially None."""

    difference: Estimate | None
    p: float | None
    exact: bool
    p_holm: float | None = None


def paired_test(differences: ArrayLike, prompts: Sequence[int], seed: int = 0) -> Paired:
    """Test whether two models differ, by the differences of samples with the same prompt and noise.

    A sign-flip permutation test (Fisher 1935, The Design of Experiments, section 21): if the models do not differ, the
    differences of a prompt are as likely as their negatives, all of a prompt together. p is the share of all 2^G signs
    of G prompts whose mean difference is at least as far from 0 as the observed one. With more than 16 prompts, 100,000
    random signs are drawn; b of them reach it, and p = (b + 1) / (100,000 + 1) (Phipson and Smyth 2010, arXiv
    1603.05766). The smallest p is 2 / 2^G: fewer than 6 prompts cannot give one below 0.05.

    Args:
        differences: (n,) new minus old; n may be 0.
        prompts: (n,) the prompt of each.
        seed: of the random signs."""
    x = np.asarray(differences, np.float64)
    if not len(x):
        return Paired(None, None, exact=True)
    sums = _sums(x, prompts)
    found, slack = abs(float(sums.sum())), 1e-12 * float(np.abs(sums).sum())  # sums in other orders round differently
    count = len(sums)
    exact = count <= _EXACT
    if exact:
        signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
        p = float(np.mean(np.abs(signs @ sums) >= found - slack))
    else:
        draws, reached = np.random.default_rng(seed), 0
        for _ in range(_DRAWS // _CHUNK):
            signs = 1 - 2 * draws.integers(0, 2, (_CHUNK, count), dtype=np.int8)
            reached += int(np.sum(np.abs(signs @ sums) >= found - slack))
        p = (reached + 1) / (_DRAWS + 1)
    return Paired(clustered_mean(x, prompts), p, exact)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number; the chance of any false positive stays below the tested level.

    The step-down procedure of Holm 1979 (Scandinavian Journal of Statistics 6, 65-70): the k-th smallest of m, counted
    from 0, is multiplied by m - k, and none is smaller than a preceding one."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, number in enumerate(sorted(range(len(ps)), key=lambda each: ps[each])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[number]))
        corrected[number] = largest
    return corrected
