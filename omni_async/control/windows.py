"""Computes which denoising steps of a group are noisy and trained: the five schedules of `rollout.sde.window`.

`uniform` is a window per group (Flow-GRPO-Fast). The others give all groups of an update the same one (MixGRPO, arXiv
2507.21802), where a group's update is counted in admission order, `groups_per_update` to each. Where groups are
rejected or overtaken that is not quite the update that trains it, but it depends on the group's number alone: a resumed
run and any number of engines draw the same windows.

A sliding window has positions 0, 1, ...; position p starts at min(lo + stride p, hi - size), so the last one touches
hi. It stays at each for a number of updates:

  progressive  updates_per_position, U
  decay        U (1 - t) + m t rounded down, t = (start - lo) / (hi - lo), m = max(1, U / 4 rounded down): towards m,
               which a window that started at hi would have (MixGRPO's public code, whose range is [0, N - 2))
  exp_decay    ceil(U exp(-decay_rate max(0, p - decay_from))), at least 1
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from omni_async.config import Config
from omni_async.config.schema import WindowConfig
from omni_async.control.seeds import draw_window
from omni_async.types import SdeWindow


def window_of(group: int, config: Config) -> SdeWindow | None:
    """Return the window of the group with this admission number; None if the recipe samples without noise."""
    if config.rollout.sde is None:
        return None
    window = config.rollout.sde.window
    if window.schedule == "uniform":
        return draw_window(config.run.seed, group, window.size, window.range)
    update = group // config.trainer.groups_per_update
    if window.schedule == "random":
        return draw_window(config.run.seed, update, window.size, window.range)
    return SdeWindow(start=_sliding_start(update, window), size=window.size)


def _sliding_start(update: int, window: WindowConfig) -> int:
    lo, hi = window.range
    last_start = hi - window.size
    last_position = math.ceil((last_start - lo) / window.stride)
    starts = [min(lo + window.stride * position, last_start) for position in range(last_position + 1)]
    ends = list(accumulate(_stay(position, start, window) for position, start in enumerate(starts)))
    if window.at_end == "roll_back":
        update %= ends[-1]
    return starts[min(bisect_right(ends, update), last_position)]


def _stay(position: int, start: int, window: WindowConfig) -> int:
    """Return the number of updates at this position, whose window begins at `start`."""
    updates = window.updates_per_position
    if window.schedule == "decay":
        lo, hi = window.range
        # In whole numbers, so that rounding down never loses an update to the interpolation's own rounding.
        return (updates * (hi - start) + max(1, updates // 4) * (start - lo)) // (hi - lo)
    if window.schedule == "exp_decay":
        return max(1, math.ceil(updates * math.exp(-window.decay_rate * max(0, position - window.decay_from))))
    return updates
