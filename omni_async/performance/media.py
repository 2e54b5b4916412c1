"""Makes media of emulated samples: random bytes that begin with the seed, which tells a scorer the sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Bytes the seed takes; no emulated media is smaller.
SEED_BYTES = 8

MediaBytes = npt.NDArray[np.uint8]


def random_bytes(size: int, seed: int) -> MediaBytes:
    """Return `size` bytes that are incompressible and read-only."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


def with_seed(media: MediaBytes, seed: int) -> MediaBytes:
    """Return a copy of `media`, at least `SEED_BYTES` of it, that begins with `seed`."""
    marked = media.copy()
    marked[:SEED_BYTES] = np.frombuffer(seed.to_bytes(SEED_BYTES, "little"), np.uint8)
    return marked


def seed_of(media: MediaBytes) -> int:
    """Read the seed. Raises ValueError for media too short to carry one."""
    if media.nbytes < SEED_BYTES:
        raise ValueError(f"emulated media has at least {SEED_BYTES} bytes, got {media.nbytes}")
    return int.from_bytes(media.reshape(-1)[:SEED_BYTES].tobytes(), "little")
