"""Makes rows to run objectives on: ratios made by hand, and real Gaussian steps."""

import math
from dataclasses import dataclass, replace

import torch

from omni_async.algorithms.objectives.base import TransitionInputs
from omni_async.sde.transitions import log_prob, take_step, transition

SHAPE = (3, 4)
D = 12


def inputs(ratios, advantages, dtype=torch.float64, **changes):
    """Makes rows of 6 elements with these ratios to an old log-prob of 0; std 0.5, scale 0.2."""
    count = len(ratios)
    given = TransitionInputs(
        log_prob=torch.tensor(ratios, dtype=dtype).log().requires_grad_(),
        old_log_prob=torch.zeros(count, dtype=dtype),
        advantage=torch.tensor(advantages, dtype=dtype),
        mean=torch.zeros(count, 2, 3, dtype=dtype),
        old_mean=None,
        std=torch.full((count,), 0.5, dtype=dtype),
        scale=torch.full((count,), 0.2, dtype=dtype),
        nats_per_log_prob=torch.full((count,), 6.0, dtype=torch.float64),
        ref_mean=None,
        num_elements=6,
        kind="flow",
    )
    return replace(given, **changes)


@dataclass
class Steps:
    """Steps x -> x_next that an old velocity took, seen by another `velocity` (R, 3, 4), a leaf that wants a
    gradient."""

    kind: str
    velocity: torch.Tensor
    old_velocity: torch.Tensor
    ref_velocity: torch.Tensor
    x: torch.Tensor
    x_next: torch.Tensor
    advantage: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor

    def at(self, velocity):
        largest = torch.full_like(self.sigma, 0.97)
        return transition(self.kind, self.x, velocity, self.sigma, self.sigma_next, largest, self.noise_level)

    def inputs(self, **changes):
        current, old, ref = self.at(self.velocity), self.at(self.old_velocity), self.at(self.ref_velocity)
        given = TransitionInputs(
            log_prob=log_prob(self.kind, self.x_next, current.mean, current.scale),
            old_log_prob=log_prob(self.kind, self.x_next, old.mean, old.scale),
            advantage=self.advantage,
            mean=current.mean,
            old_mean=old.mean,
            std=current.std,
            scale=current.scale,
            nats_per_log_prob=D / (2 * current.scale**2) if self.kind == "cps" else torch.full_like(current.scale, D),
            ref_mean=ref.mean,
            num_elements=D,
            kind=self.kind,
        )
        return replace(given, **changes)


def gaussian_steps(kind="flow", rows=24, seed=0, drift=0.3, steps_per_sample=1):
    """Makes random float64 steps; `drift` is how far the velocity has moved per element. Rows of a sample share its
    advantage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high):
        return low + (high - low) * torch.rand(rows, generator=generator, dtype=torch.float64)

    x, old_velocity, noise = normal(rows, *SHAPE), normal(rows, *SHAPE), normal(rows, *SHAPE)
    sigma, noise_level = uniform(0.4, 0.95), uniform(0.4, 0.9)
    sigma_next = sigma * uniform(0.7, 0.9)
    x_next, _, _ = take_step(kind, x, old_velocity, sigma, sigma_next, torch.full_like(sigma, 0.97), noise_level, noise)
    return Steps(
        kind=kind,
        velocity=(old_velocity + drift * normal(rows, *SHAPE)).requires_grad_(),
        old_velocity=old_velocity,
        ref_velocity=old_velocity + drift * normal(rows, *SHAPE),
        x=x,
        x_next=x_next,
        advantage=normal(rows // steps_per_sample).repeat_interleave(steps_per_sample),
        sigma=sigma,
        sigma_next=sigma_next,
        noise_level=noise_level,
    )


def ratio_of(given, *rows):
    """Returns exp of the mean log-ratio of some rows, a Python number."""
    return math.exp(math.fsum((given.log_prob[row] - given.old_log_prob[row]).item() for row in rows) / len(rows))


def clipped(advantage, ratio, clip):
    """Returns PPO's loss of one row and its derivative with respect to log ratio, as Python numbers."""
    inside = -advantage * ratio
    outside = -advantage * min(max(ratio, 1 - clip), 1 + clip)
    return max(inside, outside), (inside if inside >= outside else 0.0)


def mean_square(a, b):
    """Computes <(a - b)^2> of one row, element by element."""
    return math.fsum((p - q) ** 2 for p, q in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)) / a.numel()


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)
