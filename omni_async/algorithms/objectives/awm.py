"""Implements AWM, advantage weighted matching (arXiv 2509.25050).

PPO with the flow-matching error instead of the log-likelihood.

AWM needs final latents alone. Unlike the log-ratio of a denoising step this one is of order 1, so the clip range is
too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.decay import linear
from omni_async.algorithms.forward_process import mean_square, target
from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput
from omni_async.config.algorithm import Algorithm, Awm

_HUBER_EPS = 1e-10


def awm(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row max(-A rho, -A clip(rho, 1 - c, 1 + c)) + kl_coef K(v, v_ref) + ema K(v, v_ema).

    rho = exp(p - p_old), c = awm.clip_range.

    p is `log_likelihood` of <(v - (noise - final))^2>; p_old the same of old_velocity, at the same noise and sigma, or
    without old_velocity p itself without gradient: then rho is 1 and the gradient that of -A p. awm.ratio `exp_first`
    takes rho of each row; `sum_first` of the mean p over the `draws` rows of a sample, and each of these rows carries
    the sample's surrogate.

    A is clamped to +-advantage.clip_max and, with awm.advantage_max, scaled to +-advantage_max. K is <(v - other)^2>,
    and for kl_form `elbo` that over 2 s^2, s = 0.7 sqrt(sigma / (1 - min(sigma, 0.99))). ema goes linearly from
    awm.ema_coef to awm.ema_coef_end with `progress`.

    ValueError where a velocity that the settings need is missing: ref_velocity for kl_coef > 0, ema_velocity for ema >
    0, old_velocity for awm.off_policy.

    Metrics: flow_error <(v - (noise - final))^2>; ratio_deviation |rho - 1|; clipped_low / clipped_high, 1 where rho is
    outside; approx_kl (p - p_old)^2 / 2; kl_ref, kl_ema: K, with ref_velocity and ema_velocity."""
    settings = algorithm.awm
    _check(inputs, algorithm)
    aim, sigma = target(inputs.final.double(), inputs.noise.double()), inputs.sigma.double()
    error = mean_square(inputs.velocity, aim)
    current = log_likelihood(error, sigma, settings)
    old = (
        current
        if inputs.old_velocity is None
        else log_likelihood(mean_square(inputs.old_velocity, aim), sigma, settings)
    )
    log_ratio = current - old.detach()
    if settings.ratio == "sum_first":
        log_ratio = log_ratio.reshape(-1, inputs.draws).mean(dim=1).repeat_interleave(inputs.draws)
    ratio, clip = log_ratio.exp(), settings.clip_range
    clip_max = algorithm.advantage.clip_max
    advantage = inputs.advantage.detach().double().clamp(-clip_max, clip_max)
    if settings.advantage_max is not None:
        advantage = advantage * (settings.advantage_max / clip_max)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))

    drift = log_ratio.detach()
    metrics = {
        "flow_error": error.detach(),
        "ratio_deviation": drift.expm1().abs(),
        "clipped_low": (ratio.detach() < 1 - clip).double(),
        "clipped_high": (ratio.detach() > 1 + clip).double(),
        "approx_kl": 0.5 * drift.square(),
    }
    pulls = {
        "kl_ref": (algorithm.kl_coef, inputs.ref_velocity),
        "kl_ema": (_ema_coef(settings, inputs.progress), inputs.ema_velocity),
    }
    for name, (coef, other) in pulls.items():
        if other is not None:
            distance = _distance(inputs.velocity, other, sigma, settings)
            metrics[name] = distance.detach()
            if coef > 0:
                loss = loss + coef * distance
    dtype = torch.promote_types(inputs.velocity.dtype, torch.float32)
    return ObjectiveOutput(loss.to(dtype), {name: value.to(dtype) for name, value in metrics.items()})


def log_likelihood(error: Tensor, sigma: Tensor, settings: Awm) -> Tensor:
    """Return p (R,), at most 0, of the flow-matching error m (R,) at sigma (R,), both float64.

    weighting `uniform` -m; `sigma` -m sigma; `sigma_squared` -m sigma^2; `huber` -(sqrt(m + e) - sqrt(e)) sigma;
    `ghuber` -((m + e)^p - e^p) sigma / p with p = `power`; e = 1e-10 keeps the gradient finite at m = 0."""
    match settings.weighting:
        case "uniform":
            return -error
        case "sigma":
            return -error * sigma
        case "sigma_squared":
            return -error * sigma.square()
        case "huber":
            return -((error + _HUBER_EPS).sqrt() - _HUBER_EPS**0.5) * sigma
        case "ghuber":
            power = settings.power
            return -((error + _HUBER_EPS).pow(power) - _HUBER_EPS**power) * sigma / power


def _distance(velocity: Tensor, other: Tensor, sigma: Tensor, settings: Awm) -> Tensor:
    distance = mean_square(velocity, other)
    if settings.kl_form == "velocity":
        return distance
    variance = 0.49 * sigma / (1 - sigma.clamp(max=0.99))
    return distance / (2 * variance)


def _ema_coef(settings: Awm, progress: float) -> float:
    end = settings.ema_coef if settings.ema_coef_end is None else settings.ema_coef_end
    return linear(settings.ema_coef, end, progress)


def _check(inputs: ForwardInputs, algorithm: Algorithm) -> None:
    settings = algorithm.awm
    if algorithm.kl_coef > 0 and inputs.ref_velocity is None:
        raise ValueError(f"kl_coef is {algorithm.kl_coef} but there is no ref_velocity to compute the distance to")
    if max(settings.ema_coef, settings.ema_coef_end or 0) > 0 and inputs.ema_velocity is None:
        raise ValueError(
            f"awm.ema_coef is {settings.ema_coef} and ema_coef_end {settings.ema_coef_end}, but there is no"
            " ema_velocity to compute the distance to"
        )
    if settings.off_policy and inputs.old_velocity is None:
        raise ValueError("awm.off_policy is set but there is no old_velocity to take the ratio to")
