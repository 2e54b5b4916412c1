"""Media of emulated samples: random bytes with the sample's seed written on them, so that who scores them knows whose
they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Bytes the seed takes; no emulated media is smaller.
SEED_BYTES = 8

Media = npt.NDArray[np.uint8]


def random_bytes(size: int, seed: int) -> Media:
    """Incompressible, read-only."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def with_seed(media: Media, seed: int) -> Media:
    """A copy of `media`, at least `SEED_BYTES` of it, that begins with `seed`."""
    signed = media.copy()
    signed[:SEED_BYTES] = np.frombuffer(seed.to_bytes(SEED_BYTES, "little"), np.uint8)
    return signed


def seed_of(media: Media) -> int:
    """ValueError for media too short to carry one."""
    if media.nbytes < SEED_BYTES:
        raise ValueError(f"emulated media has at least {SEED_BYTES} bytes, got {media.nbytes}")
    return int.from_bytes(media.reshape(-1)[:SEED_BYTES].tobytes(), "little")
