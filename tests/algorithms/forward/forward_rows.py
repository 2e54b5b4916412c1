"""Makes random rows for the objectives on final latents, and the same rows as plain numbers for naive loops."""

from dataclasses import replace

import torch

from omni_async.algorithms.objectives.base import ForwardInputs

TOLERANCES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
SHAPE = (2, 3)


def make_rows(count=6, *, dtype=torch.float64, seed=0, draws=1, progress=0.0, without=(), **changes):
    """Makes rows of standard normal latents and velocities, sigma in (0.05, 1), advantages of both signs beyond +-5."""
    generator = torch.Generator().manual_seed(seed)
    # drawn in float64 whatever the dtype, so that float32 rows are the float64 ones rounded
    names = ("velocity", "final", "noise", "old_velocity", "ref_velocity", "ema_velocity")
    tensors = {name: torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64) for name in names}
    tensors["sigma"] = 0.05 + 0.95 * torch.rand(count, generator=generator, dtype=torch.float64)
    tensors["advantage"] = 4 * torch.randn(count, generator=generator, dtype=torch.float64)
    rows = ForwardInputs(**{name: value.to(dtype) for name, value in tensors.items()}, draws=draws, progress=progress)
    rows = replace(rows, **changes, **dict.fromkeys(without))
    return replace(rows, velocity=rows.velocity.detach().clone().requires_grad_())


def per_row_gradient(out, rows):
    """Returns (R, ...): the gradient of the summed loss with respect to the velocity."""
    return torch.autograd.grad(out.loss.sum(), rows.velocity)[0]


def numbers(tensor):
    """Returns one list of Python floats per row."""
    return tensor.detach().double().flatten(1).tolist()


def mean_of_squares(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)


def row_of(rows, row):
    """Returns the row alone."""
    names = ("velocity", "final", "noise", "sigma", "advantage", "old_velocity", "ref_velocity", "ema_velocity")
    return replace(rows, **{name: getattr(rows, name)[row : row + 1] for name in names})
