"""Implements the objectives on final latents (DiffusionNFT, AWM, Diffusion-DPO) and their forward process.

The forward process is x_sigma = (1 - sigma) x0 + sigma eps, with the regression target eps - x0 and the sigmas of a
sample. It needs no trajectory and no log-probs, so any solver may generate the samples. Randomness comes from the
generator argument.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from omni_async.algorithms.kinds import num_draws
from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput
from omni_async.config.algorithm import Algorithm, Awm, Forward

_SMALLEST_WEIGHT = 1e-5
_SMALLEST_LOGIT_NORMAL = 0.01
_HUBER_EPS = 1e-10


def noised(final: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_sigma = (1 - sigma) final + sigma noise, (R, ...) in final's dtype.

    Args:
        final: (R, ...), the latents x0.
        noise: (R, ...), standard normal.
        sigma: (R,).

    Raises:
        ValueError: the shapes do not fit."""
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
    """Return (R,) float64: <(a - b)^2>, the mean over all dimensions but the first. No gradient flows into b."""
    return (a.double() - b.detach().double()).square().flatten(1).mean(dim=1)


def draw_sigmas(sigmas: Tensor, forward: Forward, timestep_fraction: float, generator: Generator) -> Tensor:
    """Draw (K,) sigmas > 0 of one sample's noise draws, K = `num_draws`, in random order, like `sigmas` in dtype.

    forward.sigmas `schedule` takes all sigmas except the final 0 in a random permutation, so that none repeats before
    all have occurred (DiffusionNFT, arXiv 2509.16117); `schedule_wo_first` also omits sigmas[0]. `logit_normal` does
    not use their values: sigmoid(z) of a standard normal z, one draw from each of K equally likely strata, shifted like
    SD3 schedules, sigma = s t / (1 + (s - 1) t), and at least 0.01 (AWM, arXiv 2509.25050).

    Args:
        sigmas: (N + 1,), the sampler's own, decreasing, the last one 0.
        forward: `algorithm.forward`.
        timestep_fraction: as in `num_draws`.
        generator: the sample's.

    Raises:
        ValueError: `sigmas` has another shape or end, or as in `num_draws`."""
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] != 0:
        raise ValueError(
            f"sigmas must have shape (N + 1,), N >= 1, and end in 0, got shape {tuple(sigmas.shape)}: {sigmas.tolist()}"
        )
    count = num_draws(len(sigmas) - 1, forward, timestep_fraction)
    if forward.sigmas == "logit_normal":
        uniform = torch.from_numpy((generator.permutation(count) + generator.random(count)) / count)
        t = torch.special.ndtri(uniform).sigmoid()
        shifted = forward.shift * t / (1 + (forward.shift - 1) * t)
        return shifted.clamp(min=_SMALLEST_LOGIT_NORMAL).to(sigmas)
    choices = sigmas[1:-1] if forward.sigmas == "schedule_wo_first" else sigmas[:-1]
    rounds = range(-(-count // len(choices)))
    order = np.concatenate([generator.permutation(len(choices)) for _ in rounds])[:count]
    return choices[torch.from_numpy(order).to(choices.device)]


def diffusion_nft(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row a [r <(x+ - x0)^2> / w+ + (1 - r) <(x- - x0)^2> / w-] / beta + kl_coef <(v - v_ref)^2>.

    DiffusionNFT (arXiv 2509.16117) regresses two implicit policies, one towards good samples and one away from bad
    samples. The samples should come from the old policy, a slow copy of the current policy (`registry.nft_decay`).

    x+ and x- are the final latents that v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v predict, a is
    advantage.clip_max, r = `preference`. w+ = max(<|x+ - x0|>, 1e-5), and similarly w-, without gradient; they make
    rows of every sigma count equally. At v = v_old the gradient is the advantage times the gradient of
    <(x - x0)^2> / w, for every beta.

    Raises ValueError without old_velocity, and for kl_coef > 0 without ref_velocity.

    Metrics: preference r; positive_loss and negative_loss, the two errors over their weights; old_deviation <(v -
    v_old)^2>; with ref_velocity kl_ref <(v - v_ref)^2>."""
    if inputs.old_velocity is None:
        raise ValueError("diffusion_nft needs old_velocity, the velocity of the policy that draws the samples")
    _check_reference(inputs, algorithm)
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
    return _output(inputs, loss, metrics)


def preference(advantage: Tensor, clip_max: float, adv_mode: str) -> Tensor:
    """Return r = 1/2 + A' / (2 clip_max), (R,) float64 in [0, 1], without gradient.

    Args:
        advantage: A (R,).
        clip_max: `advantage.clip_max`.
        adv_mode: defines A'. `all`: A clamped to +-clip_max; `positive_only` and `negative_only`: that part of it, the
            other part 0; `one_only`: 1 if A > 0, else 0; `binary`: the sign of A. The last two are not scaled by
            clip_max, as in the published code: r is 1/2 or 1/2 +- 1 / (2 clip_max)."""
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
        case unknown if unknown != "all":
            raise ValueError(f"adv_mode: unknown mode {unknown!r}")
    return (0.5 + clamped / (2 * clip_max)).clamp(0, 1)


def _weighted_error(velocity: Tensor, aim: Tensor, sigma: Tensor) -> Tensor:
    """Return (R,): <(x - x0)^2> / max(<|x - x0|>, 1e-5).

    x = x_sigma - sigma v and hence x - x0 = sigma (aim - v)."""
    weight = sigma * (velocity.detach() - aim).abs().flatten(1).mean(dim=1)
    return sigma.square() * mean_square(velocity, aim) / weight.clamp(min=_SMALLEST_WEIGHT)


def awm(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row max(-A rho, -A clip(rho, 1 - c, 1 + c)) + kl_coef K(v, v_ref) + ema K(v, v_ema).

    AWM (arXiv 2509.25050) is PPO with the flow-matching error instead of the log-likelihood. rho = exp(p - p_old), c =
    awm.clip_range. Unlike the log-ratio of a denoising step, p - p_old is of order 1, and so is the clip range.

    p is `log_likelihood` of <(v - (noise - final))^2>. p_old is the same of old_velocity, at the same noise and sigma;
    without old_velocity it is p without gradient, so rho is 1 and the gradient is that of -A p. awm.ratio `exp_first`
    computes rho of each row; `sum_first` computes it of the mean p over the `draws` rows of a sample, and each of these
    rows carries the sample's surrogate.

    A is clamped to +-advantage.clip_max and, with awm.advantage_max, scaled to +-advantage_max. K is <(v - other)^2>,
    for kl_form `elbo` divided by 2 s^2, s = 0.7 sqrt(sigma / (1 - min(sigma, 0.99))). ema changes linearly from
    awm.ema_coef to awm.ema_coef_end with `progress`.

    Raises ValueError if a velocity that the settings need is missing: ref_velocity for kl_coef > 0, ema_velocity for
    ema > 0, old_velocity for awm.off_policy.

    Metrics: flow_error <(v - (noise - final))^2>; ratio_deviation |rho - 1|; clipped_low / clipped_high, 1 if rho is
    outside; approx_kl (p - p_old)^2 / 2; kl_ref, kl_ema: K, with ref_velocity and ema_velocity."""
    settings = algorithm.awm
    _check_reference(inputs, algorithm)
    _check_awm(inputs, settings)
    aim, sigma = target(inputs.final.double(), inputs.noise.double()), inputs.sigma.double()
    error = mean_square(inputs.velocity, aim)
    current = log_likelihood(error, sigma, settings)
    old = current
    if inputs.old_velocity is not None:
        old = log_likelihood(mean_square(inputs.old_velocity, aim), sigma, settings)
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
            distance = mean_square(inputs.velocity, other)
            if settings.kl_form == "elbo":
                distance = distance / (2 * (0.49 * sigma / (1 - sigma.clamp(max=0.99))))
            metrics[name] = distance.detach()
            if coef > 0:
                loss = loss + coef * distance
    return _output(inputs, loss, metrics)


def log_likelihood(error: Tensor, sigma: Tensor, settings: Awm) -> Tensor:
    """Return p (R,) float64, at most 0: the negated and weighted flow-matching error m, used as a log-likelihood.

    Args:
        error: m (R,) float64.
        sigma: (R,) float64.
        settings: `algorithm.awm`. weighting `uniform` -m; `sigma` -m sigma; `sigma_squared` -m sigma^2; `huber`
            -(sqrt(m + e) - sqrt(e)) sigma; `ghuber` -((m + e)^q - e^q) sigma / q with q = `power`; e = 1e-10 keeps the
            gradient finite at m = 0."""
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


def _ema_coef(settings: Awm, progress: float) -> float:
    """Interpolate from ema_coef at progress 0 to ema_coef_end at 1, exact at both ends."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], got {progress}")
    end = settings.ema_coef if settings.ema_coef_end is None else settings.ema_coef_end
    return (1 - progress) * settings.ema_coef + progress * end


def _check_awm(inputs: ForwardInputs, settings: Awm) -> None:
    if max(settings.ema_coef, settings.ema_coef_end or 0) > 0 and inputs.ema_velocity is None:
        raise ValueError(
            f"awm.ema_coef is {settings.ema_coef} and ema_coef_end {settings.ema_coef_end}, but there is no"
            " ema_velocity to compute the distance to"
        )
    if settings.off_policy and inputs.old_velocity is None:
        raise ValueError("awm.off_policy is set but there is no old_velocity to take the ratio to")


def diffusion_dpo(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute Diffusion-DPO (arXiv 2311.12908) for flow matching, the loss of pairs: rows alternate winner, loser.

    The winner's error should fall below the reference's by more than the loser's error does. Both rows of a pair have
    the same noise and sigma, and carry the pair's loss.

    With e = <(v - (noise - final))^2>, e_ref the same of ref_velocity, d = (e - e_ref) of the winner minus (e - e_ref)
    of the loser and b = dpo.beta / 2 (dpo.beta if not dpo.halved): `sigmoid` -log sigmoid(-b d); `hinge` max(1 + b d,
    0); `ipo` (d + 1 / (2 b))^2. The advantage is not used.

    Raises ValueError without ref_velocity, for an odd number of rows, and if noise or sigma differ within a pair.

    Metrics, the pair's in both rows: margin -b d, the implicit reward of the winner minus the loser's; accuracy, 1 if
    d < 0; winner_error, loser_error: e."""
    if inputs.ref_velocity is None:
        raise ValueError("diffusion_dpo needs ref_velocity: it compares with the reference policy")
    _check_pairs(inputs)
    aim = target(inputs.final.double(), inputs.noise.double())
    error = mean_square(inputs.velocity, aim)
    gain = error - mean_square(inputs.ref_velocity, aim).detach()
    difference = gain[0::2] - gain[1::2]
    settings = algorithm.dpo
    strength = settings.beta / 2 if settings.halved else settings.beta
    margin = -strength * difference
    match settings.loss:
        case "sigmoid":
            loss = -logsigmoid(margin)
        case "hinge":
            loss = relu(1 - margin)
        case "ipo":
            loss = (difference + 1 / (2 * strength)).square()

    metrics = {
        "margin": margin.detach(),
        "accuracy": (difference.detach() < 0).double(),
        "winner_error": error.detach()[0::2],
        "loser_error": error.detach()[1::2],
    }
    both = {name: value.repeat_interleave(2) for name, value in metrics.items()}
    return _output(inputs, loss.repeat_interleave(2), both)


def _output(inputs: ForwardInputs, loss: Tensor, metrics: dict[str, Tensor]) -> ObjectiveOutput:
    dtype = torch.promote_types(inputs.velocity.dtype, torch.float32)
    return ObjectiveOutput(loss.to(dtype), {name: value.to(dtype) for name, value in metrics.items()})


def _check_reference(inputs: ForwardInputs, algorithm: Algorithm) -> None:
    if algorithm.kl_coef > 0 and inputs.ref_velocity is None:
        raise ValueError(f"kl_coef is {algorithm.kl_coef} but there is no ref_velocity to compute the distance to")


def _check_pairs(inputs: ForwardInputs) -> None:
    rows = len(inputs.sigma)
    if rows % 2:
        raise ValueError(f"diffusion_dpo needs rows that alternate winner, loser; got an odd number of rows, {rows}")
    for name, value in (("noise", inputs.noise), ("sigma", inputs.sigma)):
        if not torch.equal(value[0::2], value[1::2]):
            differs = (value[0::2] != value[1::2]).reshape(rows // 2, -1).any(dim=1)
            pair = int(differs.nonzero()[0])
            raise ValueError(
                f"{name} must be the same for winner and loser, but differs in pair {pair} (rows {2 * pair},"
                f" {2 * pair + 1})"
            )
