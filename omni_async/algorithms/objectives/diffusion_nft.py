"""Implements DiffusionNFT (arXiv 2509.16117).

Regression of two implicit policies, one towards good samples and one away from bad ones.

DiffusionNFT needs final latents alone: no trajectory, no log-probs, any solver. The samples are meant to come from the
old policy, a slow copy of the current one; see `omni_async.algorithms.decay.nft_decay`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from omni_async.algorithms.forward_process import mean_square, target
from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput
from omni_async.config.algorithm import Algorithm

_SMALLEST_WEIGHT = 1e-5

AdvMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


def diffusion_nft(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row a [r <(x+ - x0)^2> / w+ + (1 - r) <(x- - x0)^2> / w-] / beta + kl_coef <(v - v_ref)^2>.

    x+ and x- are the final latents that v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v predict, a is
    advantage.clip_max, r = `preference`. w+ = max(<|x+ - x0|>, 1e-5), likewise w-, without gradient: it makes rows of
    every sigma count alike. At v = v_old the gradient is the advantage times that of <(x - x0)^2> / w, whatever beta.

    ValueError without old_velocity, and without ref_velocity where kl_coef > 0.

    Metrics: preference r; positive_loss and negative_loss, the two errors over their weights; old_deviation <(v -
    v_old)^2>; with ref_velocity kl_ref <(v - v_ref)^2>."""
    if inputs.old_velocity is None:
        raise ValueError("diffusion_nft needs old_velocity, the velocity of the policy that draws the samples")
    if algorithm.kl_coef > 0 and inputs.ref_velocity is None:
        raise ValueError(f"kl_coef is {algorithm.kl_coef} but there is no ref_velocity to compute the distance to")
    clip_max, beta = algorithm.advantage.clip_max, algorithm.nft.beta
    r = preference(inputs.advantage, clip_max, algorithm.nft.adv_mode)
    velocity, old = inputs.velocity.double(), inputs.old_velocity.detach().double()
    aim, sigma = target(inputs.final.double(), inputs.noise.double()), inputs.sigma.double()
    positive = _weighted_error(beta * velocity + (1 - beta) * old, aim, sigma)
    negative = _weighted_error((1 + beta) * old - beta * velocity, aim, sigma)
    loss = clip_max * (r * positive + (1 - r) * negative) / beta

    metrics = {
        "preference": r,
        "positive_loss": positive.detach(),
        "negative_loss": negative.detach(),
        "old_deviation": mean_square(velocity.detach(), old),
    }
    if inputs.ref_velocity is not None:
        kl = mean_square(velocity, inputs.ref_velocity)
        metrics["kl_ref"] = kl.detach()
        if algorithm.kl_coef > 0:
            loss = loss + algorithm.kl_coef * kl
    dtype = torch.promote_types(inputs.velocity.dtype, torch.float32)
    return ObjectiveOutput(loss.to(dtype), {name: value.to(dtype) for name, value in metrics.items()})


def preference(advantage: Tensor, clip_max: float, adv_mode: AdvMode) -> Tensor:
    """Return (R,) float64 in [0, 1], without gradient: r = 1/2 + A' / (2 clip_max) of advantages (R,), A' being

    `all` A clamped to +-clip_max; `positive_only` and `negative_only` that part of it, the other one 0; `one_only` 1
    where A > 0, else 0; `binary` the sign of A. The last two are not scaled by clip_max, as in the published code: r is
    1/2 or 1/2 +- 1 / (2 clip_max)."""
    clamped = advantage.detach().double().clamp(-clip_max, clip_max)
    match adv_mode:
        case "positive_only":
            clamped = clamped.clamp(min=0)
        case "negative_only":
            clamped = clamped.clamp(max=0)
        case "one_only":
            clamped = (clamped > 0).double()
        case "binary":
            clamped = clamped.sign()
    return (0.5 + clamped / (2 * clip_max)).clamp(0, 1)


def _weighted_error(velocity: Tensor, aim: Tensor, sigma: Tensor) -> Tensor:
    """Return (R,): <(x - x0)^2> / max(<|x - x0|>, 1e-5).

    x = x_sigma - sigma v and hence x - x0 = sigma (aim - v)."""
    weight = sigma * (velocity.detach() - aim).abs().flatten(1).mean(dim=1)
    return sigma.square() * mean_square(velocity, aim) / weight.clamp(min=_SMALLEST_WEIGHT)
