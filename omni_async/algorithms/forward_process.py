"""Implements the forward process of objectives on final latents.

x_sigma = (1 - sigma) x0 + sigma eps, its regression target eps - x0, and the sigmas that a sample is noised at.

Pure functions; randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from omni_async.algorithms.timesteps import num_draws
from omni_async.config.algorithm import Forward

_SMALLEST_LOGIT_NORMAL = 0.01


def noised(final: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_sigma = (1 - sigma) final + sigma noise, (R, ...) in final's dtype.

    `final`, `noise` (R, ...); `sigma` (R,), one per row."""
    if noise.shape != final.shape:
        raise ValueError(f"noise must have shape {tuple(final.shape)} like final, got {tuple(noise.shape)}")
    if sigma.shape != final.shape[:1]:
        raise ValueError(f"sigma must have shape {tuple(final.shape[:1])}, a number per row, got {tuple(sigma.shape)}")
    column = sigma.to(final.dtype).reshape(-1, *[1] * (final.ndim - 1))
    return (1 - column) * final + column * noise.to(final.dtype)


def target(final: Tensor, noise: Tensor) -> Tensor:
    """Return noise - final: the velocity of the straight path from `final` to `noise`, at every sigma."""
    return noise - final


def mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Return (R,) float64: <(a - b)^2>, the mean over all dimensions but the first. b is data.

    No gradient flows into it."""
    return (a.double() - b.detach().double()).square().flatten(1).mean(dim=1)


def draw_sigmas(sigmas: Tensor, forward: Forward, timestep_fraction: float, generator: Generator) -> Tensor:
    """Draw (K,) sigmas > 0 of one sample's noise draws, K = `num_draws`, in random order.

    They have the dtype and the device of `sigmas`.

    sigmas (N + 1,): the sampler's own, decreasing, the last one 0. `schedule` takes the others in a random permutation,
    so none repeats before all have occurred (DiffusionNFT, arXiv 2509.16117); `schedule_wo_first` without sigmas[0].
    `logit_normal` does not use their values: sigmoid(z) of a standard normal z, one draw from each of K equally likely
    strata, shifted as SD3 schedules are, sigma = s t / (1 + (s - 1) t), and at least 0.01 (AWM, arXiv 2509.25050)."""
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] != 0:
        raise ValueError(
            f"sigmas must have shape (N + 1,), N >= 1, and end in 0, got shape {tuple(sigmas.shape)}: {sigmas.tolist()}"
        )
    count = num_draws(len(sigmas) - 1, forward, timestep_fraction)
    where = generator.device
    if forward.sigmas == "logit_normal":
        strata = torch.randperm(count, generator=generator, device=where)
        uniform = (strata + torch.rand(count, generator=generator, device=where, dtype=torch.float64)) / count
        t = torch.special.ndtri(uniform).sigmoid()
        shifted = forward.shift * t / (1 + (forward.shift - 1) * t)
        return shifted.clamp(min=_SMALLEST_LOGIT_NORMAL).to(sigmas)
    choices = sigmas[1:-1] if forward.sigmas == "schedule_wo_first" else sigmas[:-1]
    permutations = [
        torch.randperm(len(choices), generator=generator, device=where) for _ in range(-(-count // len(choices)))
    ]
    return choices[torch.cat(permutations)[:count].to(choices.device)]
