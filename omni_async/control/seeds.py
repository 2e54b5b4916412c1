"""Derives prompt order, SDE windows, buckets and noise seeds from the run seed and ids.

None of it comes from time, worker or placement.

A regenerated sample is therefore the same sample, and a run's data are independent of how many engines drew them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

from omni_async.types import Prompt, SdeWindow


def derive(*parts: int | str) -> int:
    """Return a 63-bit integer from the parts; any change of any part gives an unrelated number."""
    return _number(_hashed(*parts))


def derive_each(parts: tuple[int | str, ...], lasts: Iterable[int]) -> list[int]:
    """Return `derive(*parts, last)` of each last part; the others are hashed once."""
    common = _hashed(*parts, "")
    numbers = []
    for last in lasts:
        full = common.copy()
        full.update(b"%d" % last)
        numbers.append(_number(full))
    return numbers


def _hashed(*parts: int | str) -> hashlib.blake2b:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8)


def _number(hashed: hashlib.blake2b) -> int:
    return int.from_bytes(hashed.digest(), "little") >> 1


def sample_seed(run_seed: int, prompt: int, group: int | str, sample: int) -> int:
    return derive("sample", run_seed, prompt, group, sample)


def sample_seeds(run_seed: int, prompt: int, group: int | str, count: int) -> list[int]:
    """Return `sample_seed` of a group's samples 0, 1, ..., count - 1."""
    return derive_each(("sample", run_seed, prompt, group), range(count))


def initial_noise_seed(run_seed: int, prompt: int, group: int | str) -> int:
    """Return the seed of the first latents, for groups whose samples share them."""
    return derive("initial", run_seed, prompt, group)


def draw_window(run_seed: int, number: int, size: int, bounds: tuple[int, int]) -> SdeWindow:
    """Draw the window of a group's or an update's `number`.

    Its start is uniform on lo..hi-size, both ends included."""
    lo, hi = bounds
    start = random.Random(derive("window", run_seed, number)).randint(lo, hi - size)
    return SdeWindow(start=start, size=size)


def draw_bucket(run_seed: int, number: int, weights: Sequence[float]) -> int:
    """Draw the bucket of group `number`: bucket i with probability weights[i] / sum(weights)."""
    (bucket,) = random.Random(derive("bucket", run_seed, number)).choices(range(len(weights)), weights)
    return bucket


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
