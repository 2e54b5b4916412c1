"""Distinguishes real trends and shares from chance, by their 95 % intervals."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

_Z = 1.96  # two-sided, 95 %


class Trend(msgspec.Struct, frozen=True):
    """A straight line through values: `slope` per value with its 95 % interval; `noise`: the deviation from it."""

    slope: float
    low: float
    high: float
    noise: float


@np.errstate(over="ignore", invalid="ignore")  # impossible rewards may overflow; their trend is no number
def trend(values: npt.NDArray[np.float64]) -> Trend | None:
    """Fit a line by least squares; None for fewer than 3 values.

    The interval allows for residuals that resemble their predecessors (autocorrelation of the first order): successive
    updates share samples' policies and prompts."""
    count = len(values)
    if count < 3:
        return None
    x = np.arange(count) - (count - 1) / 2
    slope = float(x @ values / (x @ x))
    rest = values - values.mean() - slope * x
    variance = float(rest @ rest) / (count - 2)
    again = float(rest[1:] @ rest[:-1]) / float(rest @ rest) if variance > 0 else 0.0
    again = min(max(again, 0.0), 0.95)
    half = float(stdtrit(count - 2, 0.975)) * math.sqrt(variance / float(x @ x) * (1 + again) / (1 - again))
    return Trend(slope, slope - half, slope + half, math.sqrt(variance))


def share_at_least(part: int, whole: int) -> float:
    """Return the lower end of the 95 % interval of a share (Wilson's)."""
    if whole <= 0:
        return 0.0
    share = min(max(part / whole, 0.0), 1.0)  # the lines may have been edited
    middle = share + _Z**2 / 2 / whole
    half = _Z * math.sqrt(share * (1 - share) / whole + (_Z / 2 / whole) ** 2)
    return (middle - half) / (1 + _Z**2 / whole)
