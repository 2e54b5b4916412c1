"""Derives prompt order, SDE windows, buckets and noise seeds from the run seed and ids.

None of it depends on time, worker or placement. A regenerated sample is therefore the same sample, and a run's data do
not depend on the number of engines.

The window, the denoising steps of a group that are noisy and trained, has five schedules (`rollout.sde.window`).
`uniform` is a window per group (Flow-GRPO-Fast). The others give all groups of an update the same window (MixGRPO,
arXiv 2507.21802). A group's update is counted in admission order, with `groups_per_update` groups each. If groups are
rejected or overtaken, another update may train the group. The window still depends on the group's number alone, so a
resumed run and any number of engines draw the same windows.

A sliding window has positions 0, 1, ...; position p starts at min(lo + stride p, hi - size), so the last window touches
hi. It stays at each position for a number of updates:

  progressive  updates_per_position, U
  decay        U (1 - t) + m t rounded down, t = (start - lo) / (hi - lo), m = max(1, U / 4 rounded down); it would
               reach m for a window that starts at hi (MixGRPO's public code, whose range is [0, N - 2))
  exp_decay    ceil(U exp(-decay_rate max(0, p - decay_from))), at least 1
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from omni_async.config import Config
from omni_async.config.rollout import WindowConfig
from omni_async.types import Prompt, SdeWindow

# The generator of `omni_async.diffusion.sde.noise`. With another generator the same seed gives other noise.
NOISE = "Philox"


def derive(*parts: int | str) -> int:
    """Return a 63-bit integer derived from the parts; any change of a part gives an unrelated number."""
    return _number(_hashed(*parts))


def _hashed(*parts: int | str) -> hashlib.blake2b:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8)


def _number(hashed: hashlib.blake2b) -> int:
    return int.from_bytes(hashed.digest(), "little") >> 1


def sample_seeds(run_seed: int, prompt: int, group: int | str, count: int) -> list[int]:
    """Return the noise seeds of samples 0, 1, ..., count - 1; their common prefix is hashed once.

    Args:
        run_seed: `run.seed`.
        prompt: the prompt's index.
        group: the group's number, or `validation` for samples that are the same in every round.
        count: how many samples it has."""
    common = _hashed("sample", run_seed, prompt, group, "")
    seeds = []
    for sample in range(count):
        full = common.copy()
        full.update(b"%d" % sample)
        seeds.append(_number(full))
    return seeds


def initial_noise_seed(run_seed: int, prompt: int, group: int | str) -> int:
    """Return the seed of the first latents, for groups whose samples share them.

    Args:
        run_seed, prompt, group: as in `sample_seeds`."""
    return derive("initial", run_seed, prompt, group)


def draw_window(run_seed: int, number: int, size: int, bounds: tuple[int, int]) -> SdeWindow:
    """Draw a window whose start is uniform on lo..hi-size, both ends included.

    Args:
        run_seed: `run.seed`.
        number: of the group, or of the update if all its groups share the window.
        size: denoising steps in the window.
        bounds: lo and hi, `rollout.sde.window.range`."""
    lo, hi = bounds
    start = random.Random(derive("window", run_seed, number)).randint(lo, hi - size)
    return SdeWindow(start=start, size=size)


def draw_bucket(run_seed: int, number: int, weights: Sequence[float]) -> int:
    """Draw a group's bucket: bucket i with probability weights[i] / sum(weights).

    Args:
        run_seed: `run.seed`.
        number: the group's.
        weights: one per bucket, positive."""
    (bucket,) = random.Random(derive("bucket", run_seed, number)).choices(range(len(weights)), weights)
    return bucket


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
    """Return the number of updates at this position, where the window begins at `start`."""
    updates = window.updates_per_position
    if window.schedule == "decay":
        lo, hi = window.range
        # Integer arithmetic, so that rounding errors of the interpolation never lose an update.
        return (updates * (hi - start) + max(1, updates // 4) * (start - lo)) // (hi - lo)
    if window.schedule == "exp_decay":
        return max(1, math.ceil(updates * math.exp(-window.decay_rate * max(0, position - window.decay_from))))
    return updates


class PromptStream:
    """The prompt of the n-th admitted group: epochs over the file, each in its own seeded order if shuffled."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("no prompts")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(derive("epoch", self._seed, epoch)).shuffle(order)
        return order

    def __getitem__(self, n: int) -> Prompt:
        epoch, position = divmod(n, len(self._prompts))
        return self._prompts[self._order(epoch)[position]]
