"""Draws noise that depends on the request alone: neither batch, engine, window nor placement changes it.

Every draw has a generator of its own, seeded by a hash of (seed, purpose, step), so a draw never depends on earlier
draws.
"""

from __future__ import annotations

import hashlib

import torch


def _draw(seed: int, purpose: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    digest = hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest()
    # The CPU generator is the only one that gives the same numbers on every machine.
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def initial_noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the latents at sigma_0: standard normal float32 of `shape` on the CPU."""
    return _draw(seed, "initial", 0, shape)


def step_noise(seed: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the noise that a transition adds: standard normal float32 on the CPU.

    Args:
        seed: the request's.
        step: the transition's number, from 0.
        shape: that of one sample's latents."""
    return _draw(seed, "step", step, shape)
