"""Implements the objectives on denoising steps, and their common parts.

The common parts are log-ratios, PPO's clipped surrogate (arXiv 1707.06347, eq. 7), the KL to the reference and to a
teacher, and their metrics. All numbers per row are float64: clip ranges are often 1e-5 or less, and float32 has only
about a hundred values that close to 1.

| objective  | paper            | its own part                                                       |
|------------|------------------|--------------------------------------------------------------------|
| flow_grpo  | arXiv 2505.05470 | PPO's clipped surrogate per denoising step, a KL to the reference  |
| dance_grpo | arXiv 2505.07818 | the same without KL, on the transition "dance"                     |
| mix_grpo   | arXiv 2507.21802 | the same on the steps of a window that the sampler slides          |
| grpo_guard | arXiv 2510.22319 | log-ratios centred and rescaled to one width at every step         |
| flow_dppo  | arXiv 2606.11025 | no clip: drops rows that drifted too far and would drift further   |
| gspo       | arXiv 2507.18071 | one ratio per sample, the geometric mean over its denoising steps  |
| reinforce  | Williams (1992)  | no ratio in the gradient: the log-prob times A and a weight        |
| distill    | arXiv 2605.15055 | the KL to the teacher alone: no ratio, no advantage                |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.config.algorithm import Algorithm, ClipRange

Metrics = dict[str, Tensor]

_PUBLISHED_CLIP_RANGE = 1e-4  # flow_grpo, VeRL-Omni


def log_ratios(inputs: TransitionInputs) -> Tensor:
    """Return (R,) float64 with gradient: log_prob - old_log_prob, the log-ratio per latent element.

    Its exponential is the D-th root of the ratio of densities, as in the public code of flow_grpo, VeRL-Omni and
    DanceGRPO; hence clip ranges of order 1 / D. For kind "cps" it is not a ratio of densities, since the log-prob lacks
    the factor 1 / (2 scale^2)."""
    return inputs.log_prob.to(torch.float64) - inputs.old_log_prob.detach().to(torch.float64)


def log_ratios_nats(inputs: TransitionInputs) -> Tensor:
    """Return L (R,) float64 without gradient: the log-ratio of densities of a sample in nats, for every kind."""
    return inputs.nats_per_log_prob.detach().to(torch.float64) * log_ratios(inputs).detach()


def clipped_log_ratios(inputs: TransitionInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return what the clip compares with its range, per latent element and in nats; (R,) float64 without gradient.

    clip_centre `zero`: the log-ratio and L. `drift`: both plus the KL of the step, D kappa in nats, with kappa =
    <(mean - old_mean)^2> / (2 scale^2). L ~ N(-D kappa, 2 D kappa) under the old policy, so L + D kappa has mean 0 and
    the clip takes equally many rows on both sides (GRPO-Guard, arXiv 2510.22319, removes the same bias per element).

    Raises:
        ValueError: `drift` without old_mean."""
    log_ratio, nats = log_ratios(inputs).detach(), log_ratios_nats(inputs)
    if algorithm.clip_centre == "zero":
        return log_ratio, nats
    if inputs.old_mean is None:
        raise ValueError("clip_centre drift needs old_mean, the means of the policy that old_log_prob belongs to")
    kappa = mean_square_difference(inputs.mean.detach(), inputs.old_mean) / (
        2 * inputs.scale.detach().double().square()
    )
    drift = inputs.num_elements * kappa
    return log_ratio + drift / inputs.nats_per_log_prob.detach().double(), nats + drift


def mean_square_difference(mean: Tensor, other: Tensor) -> Tensor:
    """Return (R,) float64: <(mean - other)^2> of two (R, ...), the mean over all axes except rows; `other` is data."""
    return (mean - other.detach()).square().flatten(1).mean(dim=1, dtype=torch.float64)


def clipped_surrogate(
    advantage: Tensor,
    algorithm: Algorithm,
    log_ratio: Tensor,
    measured: Tensor,
    nats: Tensor | None,
    published: ClipRange = _PUBLISHED_CLIP_RANGE,
) -> tuple[Tensor, Metrics]:
    """Return per row max(-A r, -A clip(r)) with r = exp(log_ratio), and the metrics of r. All (R,) float64.

    With clip_range c (`published` if neither is given) exp(measured) is clipped to [1 - c, 1 + c], with clip_range_nats
    c `nats` to [-c, c]; a pair (low, high) is [1 - low, 1 + high] and [-low, high] (DAPO, arXiv 2503.14476, eq. 10). A
    row outside has no gradient if A pushes it further out, and the end of the range in place of r.

    dual_clip c bounds the loss of a row with A < 0 at c |A|: a row whose exp(measured), or exp(nats) with
    clip_range_nats, exceeds c has no gradient, and that bound in place of r (dual-clip PPO, arXiv 1912.09729).

    Metrics: ratio_deviation |r - 1|; clipped_low, clipped_high: 1 for rows that are outside, whether or not the clip
    removes the gradient, as in flow_grpo; with dual_clip dual_clipped: 1 for rows whose loss it bounds.

    Args:
        advantage: (R,), A.
        algorithm: read for the clip ranges.
        log_ratio: (R,) float64, with gradient.
        measured: (R,) float64, the log-ratio that is compared with clip_range: `clipped_log_ratios`.
        nats: (R,) float64, the same in nats of the whole sample; None if it is undefined.
        published: the clip range without clip_range and clip_range_nats.

    Raises:
        ValueError: clip_range_nats together with clip_range, or without `nats`."""
    advantage = advantage.detach().to(torch.float64)
    ratio = log_ratio.exp()
    if algorithm.clip_range_nats is None:
        below, above = ends_of(published if algorithm.clip_range is None else algorithm.clip_range)
        compared = measured.exp()
        low, high = compared < 1 - below, compared > 1 + above
        bound = compared.clamp(1 - below, 1 + above)
    else:
        below, above = ends_of(algorithm.clip_range_nats)
        compared = _in_nats(algorithm, nats)
        low, high = compared < -below, compared > above
        bound = torch.where(low, _at_end(measured, compared, below), _at_end(measured, compared, above))
    held = (high & (advantage > 0)) | (low & (advantage < 0))
    loss = -advantage * torch.where(held, bound, ratio)
    metrics = {
        "ratio_deviation": log_ratio.expm1().abs(),
        "clipped_low": low.to(torch.float64),
        "clipped_high": high.to(torch.float64),
    }
    if algorithm.dual_clip is not None:
        most = math.log(algorithm.dual_clip)
        if algorithm.clip_range_nats is None:
            beyond, bound = measured > most, torch.full_like(measured, algorithm.dual_clip)
        else:
            beyond, bound = compared > most, _at_end(measured, compared, most)
        beyond = beyond & (advantage < 0)
        loss = torch.where(beyond, -advantage * bound, loss)
        metrics["dual_clipped"] = beyond.to(torch.float64)
    return loss, metrics


def ends_of(clip: ClipRange) -> tuple[float, float]:
    """Return (low, high) of a clip range, both > 0."""
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    return low, high


def _in_nats(algorithm: Algorithm, nats: Tensor | None) -> Tensor:
    if algorithm.clip_range is not None:
        raise ValueError(
            f"give clip_range or clip_range_nats, not both (got {algorithm.clip_range} and {algorithm.clip_range_nats})"
        )
    if nats is None:
        raise ValueError(
            f"algorithm.clip_range_nats: the ratio of {algorithm.name} is rescaled, so no bound on it is one in nats;"
            " use clip_range"
        )
    return nats


def _at_end(measured: Tensor, nats: Tensor, end: float) -> Tensor:
    """Return (R,), exp(measured) where |nats| <= end; elsewhere its value at |nats| = end, on the same side of 1."""
    return (measured * (end / nats.abs().clamp(min=end))).exp()


def gaussian_kl(inputs: TransitionInputs, other_mean: Tensor, algorithm: Algorithm) -> Tensor:
    """Return (R,) float64, per latent element, with gradient: <(mean - other_mean)^2> / (2 s^2).

    kl_form "published": s = std, as in flow_grpo and VeRL-Omni; "exact": s = scale, the KL between the two Gaussians.
    For kind "flow" the published value is the exact value times the step size; for "dance" and "cps" they agree.
    "mean": <(mean - ref_mean)^2> without a divisor (Flow-Factory's x-space form).

    Args:
        inputs: read for mean, std and scale.
        other_mean: (R, ...), of a frozen policy: the reference, or the teacher.
        algorithm: read for kl_form."""
    square = mean_square_difference(inputs.mean, other_mean)
    if algorithm.kl_form == "mean":
        return square
    width = inputs.std if algorithm.kl_form == "published" else inputs.scale
    return square / (2 * width.detach().to(torch.float64).square())


def objective_output(
    inputs: TransitionInputs, algorithm: Algorithm, policy_loss: Tensor, metrics: Metrics, penalty: Tensor | None = None
) -> ObjectiveOutput:
    """Compute weight policy_loss + kl_coef KL + teacher.coef KL_teacher + penalty per row, in log_prob's dtype.

    The KL to the teacher is of the policy in training, whatever policy took the step: stale samples change the states,
    not the term (arXiv 2606.24143). Adds the metrics approx_kl = log_ratios^2 / 2 and, with ref_mean or teacher_mean,
    kl_ref and kl_teacher in the form of `kl_form`.

    Args:
        inputs: read for weight (default 1), log-probs and KLs.
        algorithm: read for kl_coef, teacher and kl_form.
        policy_loss: (R,) float64.
        metrics: the objective's own, names to (R,).
        penalty: (R,) float64, not multiplied by the weight; None: 0.

    Raises:
        ValueError: kl_coef > 0 without ref_mean, or a teacher without teacher_mean."""
    loss = policy_loss if inputs.weight is None else inputs.weight.detach().to(torch.float64) * policy_loss
    if penalty is not None:
        loss = loss + penalty
    metrics = {**metrics, "approx_kl": 0.5 * log_ratios(inputs).square()}
    coef = 0.0 if algorithm.teacher is None else algorithm.teacher.coef
    pulls = {
        "kl_ref": ("kl_coef", algorithm.kl_coef, "ref_mean"),
        "kl_teacher": ("teacher.coef", coef, "teacher_mean"),
    }
    for name, (key, weight, other) in pulls.items():
        if (mean := getattr(inputs, other)) is not None:
            metrics[name] = gaussian_kl(inputs, mean, algorithm)
            loss = loss + weight * metrics[name] if weight > 0 else loss
        elif weight > 0:
            raise ValueError(f"algorithm.{key} is {weight} but there is no {other} to compute the KL to")
    dtype = inputs.log_prob.dtype
    return ObjectiveOutput(loss.to(dtype), {name: value.detach().to(dtype) for name, value in metrics.items()})


def flow_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) + kl_coef KL, with r = exp(log_prob - old_log_prob).

    c is clip_range; clip_range_nats bounds L = D log r instead (for "cps" D log r / (2 S^2)). Two-sided ranges and
    dual_clip: `clipped_surrogate`; clip_centre: `clipped_log_ratios`. w is the weight, 1 if there is no correction. KL:
    `reference_kl`. Raises ValueError for kl_coef > 0 without ref_mean, and for clip_centre drift without old_mean.

    Metrics: ratio_deviation |r - 1|; clipped_low, clipped_high: 1 if r is outside 1 +- c; with dual_clip dual_clipped;
    approx_kl (log r)^2 / 2; with ref_mean kl_ref."""
    loss, metrics = clipped_surrogate(
        inputs.advantage, algorithm, log_ratios(inputs), *clipped_log_ratios(inputs, algorithm)
    )
    return objective_output(inputs, algorithm, loss, metrics)


def dance_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute `flow_grpo`, for any transition kind. Raises ValueError for kl_coef > 0: DanceGRPO has no KL."""
    if algorithm.kl_coef > 0:
        raise ValueError(
            f"algorithm.kl_coef: dance_grpo has no KL term, got {algorithm.kl_coef}; flow_grpo is the same loss"
            " with one"
        )
    return flow_grpo(inputs, algorithm)


def mix_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) + mix.log_ratio_coef (log r)^2 / 2 + kl_coef KL.

    r, c, w, KL are as in `flow_grpo`. MixGRPO's public code calls the middle term its KL: a pull to the policy of
    old_log_prob, from the sampled log-ratio alone. w does not multiply it. Errors and metrics are as in `flow_grpo`;
    approx_kl is the middle term without its coefficient."""
    log_ratio = log_ratios(inputs)
    loss, metrics = clipped_surrogate(inputs.advantage, algorithm, log_ratio, *clipped_log_ratios(inputs, algorithm))
    coef = algorithm.mix.log_ratio_coef
    return objective_output(inputs, algorithm, loss, metrics, 0.5 * coef * log_ratio.square() if coef > 0 else None)


def grpo_guard(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) / h + kl_coef KL, r = exp((log_prob - old_log_prob + b) S).

    With x' = old mean + S eps and drift d = (mean - old_mean) / S, the log-ratio per element is <d eps> - <d^2> / 2.
    The bias b adds the second term back. The expectation under the old policy is then zero, so that the clip binds
    equally on both sides. The factor S removes the 1 / S in the first term.

    b = <(mean - old_mean)^2> / (2 S^2), each row's own, carries the gradient. sqrt(h) = scale / std. guard.scale
    "sample": S = scale and h are the row's own (Flow-Factory). "batch": S = mean(sqrt(h)) mean(std) and h =
    mean(sqrt(h))^2 over the given rows (VeRL-Omni). Rows of different steps in a micro-batch then share both; compose
    micro-batches of several steps accordingly. guard.divide false: no division by h. c, w, KL as in `flow_grpo`; c is
    compared with a log-ratio that is S times as wide, so it cannot be given in nats.

    Raises ValueError for a kind other than "flow", since only its scale is std sqrt(h); without old_mean; for
    clip_range_nats; for kl_coef > 0 without ref_mean.

    Metrics: as in `flow_grpo`, with ratio_deviation and clipped_* of the r above, approx_kl of the original log-ratio;
    guard_bias."""
    if inputs.kind != "flow":
        raise ValueError(
            "grpo_guard rescales ratios by std sqrt(step size), the noise scale of kind 'flow' alone; got"
            f" {inputs.kind!r}"
        )
    if inputs.old_mean is None:
        raise ValueError("grpo_guard needs old_mean, the means of the policy that old_log_prob belongs to; got None")
    std = inputs.std.detach().to(torch.float64)
    root_h = inputs.scale.detach().to(torch.float64) / std
    if algorithm.guard.scale == "batch":
        std, root_h = std.mean(), root_h.mean()
    width = root_h * std
    bias = mean_square_difference(inputs.mean, inputs.old_mean) / (2 * width.square())
    log_ratio = (log_ratios(inputs) + bias) * width
    loss, metrics = clipped_surrogate(inputs.advantage, algorithm, log_ratio, log_ratio.detach(), nats=None)
    if algorithm.guard.divide:
        loss = loss / root_h.square()
    return objective_output(inputs, algorithm, loss, {**metrics, "guard_bias": bias})


def flow_dppo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row -w A r + kl_coef KL, with r = exp(log_prob - old_log_prob); in a dropped row -w A r is 0.

    The drift is the KL between two Gaussians, which has no sampling noise, whereas a ratio may be large or small
    because of the noise. A row is dropped, but still counts, if kappa >= kappa_max and (A > 0 and r > 1, or A < 0 and
    r < 1). kappa = <(mean - old_mean)^2> / (2 s^2) is per latent element, with s = scale (dppo.width "transition", the
    exact KL of any kind) or s = 1 ("unit"). dppo.kappa_max_nats is compared with D kappa (in nats only with
    "transition") and replaces dppo.kappa_max. The clip range is ignored, and A is used unchanged. w, KL as in
    `flow_grpo`.

    Raises ValueError without old_mean, and for kl_coef > 0 without ref_mean. Metrics: ratio_deviation |r - 1|; dropped,
    1 or 0; approx_kl (log r)^2 / 2; with ref_mean kl_ref."""
    if inputs.old_mean is None:
        raise ValueError("flow_dppo needs old_mean, the means of the policy that old_log_prob belongs to; got None")
    settings = algorithm.dppo
    limit = settings.kappa_max if settings.kappa_max_nats is None else settings.kappa_max_nats / inputs.num_elements
    kappa = mean_square_difference(inputs.mean.detach(), inputs.old_mean) / 2
    if settings.width == "transition":
        kappa = kappa / inputs.scale.detach().to(torch.float64).square()
    advantage = inputs.advantage.detach().to(torch.float64)
    log_ratio = log_ratios(inputs)
    dropped = (kappa >= limit) & (advantage * log_ratio.detach().sign() > 0)
    loss = torch.where(dropped, 0.0, -advantage * log_ratio.exp())
    metrics = {"ratio_deviation": log_ratio.expm1().abs(), "dropped": dropped.to(torch.float64)}
    return objective_output(inputs, algorithm, loss, metrics)


def gspo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A s, -A clip(s, 1 - c, 1 + c)) + kl_coef KL, s = exp(the sample's mean log-ratio).

    A sample is `steps_per_sample` consecutive rows. They share s, which passes the gradient to every row, and each row
    carries the whole sample's surrogate: the mean over rows is the mean over samples, in value and gradient. A row's
    weight w multiplies its own copy, so a trajectory's weight is set on all rows of the sample. The KL is each row's
    own, as in `flow_grpo`. c bounds the average step, clip_range_nats the mean over steps of L. GSPO's own c (3e-4) is
    for tokens: here it is of order 1 / D, as in `flow_grpo`. With correction.steps "kept" all means are over the steps
    of weight > 0, which VeRL's rejection masks leave; s = 1 without such steps.

    Raises ValueError as `flow_grpo`. Metrics: as in `flow_grpo`, with ratio_deviation and clipped_* of s, repeated on
    the sample's rows, and approx_kl of each row's own log-ratio."""
    kept = None
    if algorithm.correction.steps == "kept" and inputs.weight is not None:
        kept = (inputs.weight > 0).unflatten(0, (-1, inputs.steps_per_sample))

    def mean_over_steps(rows: Tensor) -> Tensor:
        steps = rows.unflatten(0, (-1, inputs.steps_per_sample))
        if kept is None:
            mean = steps.mean(dim=1)
        else:
            mean = torch.where(kept, steps, 0.0).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        return mean.repeat_interleave(inputs.steps_per_sample)

    measured, nats = map(mean_over_steps, clipped_log_ratios(inputs, algorithm))
    loss, metrics = clipped_surrogate(inputs.advantage, algorithm, mean_over_steps(log_ratios(inputs)), measured, nats)
    return objective_output(inputs, algorithm, loss, metrics)


def reinforce(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row -w A log_prob + kl_coef KL: REINFORCE (Williams, 1992), with the off-policy weight w as data.

    In mode `bypass` w is the importance weight of the current policy to the policy that took the step, truncated at
    correction.cap (TIS); VeRL calls this bypass with its policy-gradient loss. Without weights w is 1. At w = 1 the
    gradient is that of `flow_grpo` at r = 1, so learning rates carry over. KL as in `flow_grpo`.

    Raises ValueError for kl_coef > 0 without ref_mean. Metrics: ratio_deviation |r - 1| and approx_kl (log r)^2 / 2 of
    the ratio r to old_log_prob, which the loss does not contain; with ref_mean kl_ref."""
    loss = -inputs.advantage.detach().to(torch.float64) * inputs.log_prob.to(torch.float64)
    return objective_output(inputs, algorithm, loss, {"ratio_deviation": log_ratios(inputs).expm1().abs()})


def distill(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row teacher.coef KL(policy || teacher) + kl_coef KL, at the states of the policy's own samples.

    On-policy distillation: the per-step KL of two Gaussians of equal variance, DiffusionOPD's closed form (arXiv
    2605.15055), whose gradient needs no samples of the step's noise. The advantage, old_log_prob and the weight are
    ignored. KL: `gaussian_kl`.

    Raises ValueError without teacher_mean, and for kl_coef > 0 without ref_mean. Metrics: approx_kl of the log-ratio to
    old_log_prob; kl_teacher; with ref_mean kl_ref."""
    return objective_output(inputs, algorithm, torch.zeros_like(inputs.log_prob, dtype=torch.float64), {})
