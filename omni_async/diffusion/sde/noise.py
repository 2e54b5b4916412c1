"""Draws noise that depends only on the request, not on batch, engine, window or placement.

Every draw has its own generator, keyed by a hash of (seed, purpose, step), so a draw never depends on earlier draws.
All 63 bits of a seed count. Torch's CPU generator uses only 32 bits: two of 77,000 samples would then more likely than
not have the same noise.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def generator_of(seed: int, purpose: str, step: int = 0) -> np.random.Generator:
    """Return the generator of one draw: Philox, whose bits are the same on every machine, with a key of 128 bits.

    Args:
        seed: the sample's, any integer.
        purpose: the use of the draw; no two purposes share a stream.
        step: the draw's number, if a purpose has several draws."""
    key = hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def standard_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the generator's next standard normal numbers: float32 of `shape` on the CPU."""
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))


def initial_noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the latents at sigma_0: standard normal float32 of `shape` on the CPU."""
    return standard_normal(generator_of(seed, "initial"), shape)


def step_noise(seed: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the noise that a transition adds: standard normal float32 on the CPU.

    Args:
        seed: the request's.
        step: the transition's number, from 0.
        shape: the shape of one sample's latents."""
    return standard_normal(generator_of(seed, "step", step), shape)
