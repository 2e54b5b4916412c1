"""Corrects the loss for the distance between the policy that generated a sample and the policy trained on it.

There are N samples x W trained steps. b is the behaviour policy (the engine's weights and kernels when the step was
taken), p the proximal policy (the trainer's weights at the start of the update). Each step is a Gaussian given its
input. So a step's log-ratio needs only the log-prob recorded with the step, even if the engine's weights changed in
mid-trajectory. A token is a step with D = 1 whose log-prob is exact; answers of fewer than W tokens are padded. `Drift`
is the distance, row by row. `correct` derives from it, as configured in `algorithm.correction`:

- masks, rules that leave rows out of the loss (`omni_async.algorithms.rejection`). kappa is the KL itself, in closed
  form for Gaussians. Unlike L it does not depend on the drawn noise, so it rejects real drift and not bad luck.
- importance weights w = p / b: exact or tempered (`omni_async.algorithms.tempering`), truncated, raised, or 0 outside
  a band. Whole-sample log-ratios (`sum`) give exact weights. The mean over D latent elements (`mean`, published code)
  gives their D-th root, which differs from 1 by about 1e-5 at image sizes and corrects nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from omni_async.algorithms.checks import correction_problems
from omni_async.algorithms.rejection import k1_mask, m2po_mask, statistic_mask
from omni_async.algorithms.tempering import tempering_exponent
from omni_async.config.algorithm import Correction
from omni_async.config.section import LARGEST

MAX_EXPONENT = 20.0


@dataclass(frozen=True)
class Drift:
    """The drift of N samples x W trained steps.

    `log_ratio` (N, W) float64: L = log p(x' | x) - log b(x' | x) of the whole sample in nats (`nats_per_log_prob` of
    `omni_async.diffusion.sde` converts mean log-probs). `kappa` (N, W) float64: D kappa, the exact Gaussian KL of the
    step in nats; None if the behaviour means are unknown. `steps` (N, W) int64: the denoising step of each row; only
    tempering per step reads it. `valid` (N, W) bool: False in places behind the end of a sample, whose values nothing
    reads; None: all samples have W steps.

    Under b with equal variances L ~ N(-D kappa, 2 D kappa), so D kappa is the drift without the effect of the noise.
    Mode `bypass` has no proximal policy, and L is the log-ratio of the policy in training. Raises ValueError for other
    shapes or dtypes, values that are not finite, kappa < 0, and tensors with a gradient, since a correction is data."""

    log_ratio: Tensor
    kappa: Tensor | None = None
    steps: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.log_ratio.ndim != 2 or self.log_ratio.numel() == 0:
            raise ValueError(f"log_ratio must have shape (N, W) with N, W >= 1, got {tuple(self.log_ratio.shape)}")
        if self.steps is not None and (self.steps.shape != self.log_ratio.shape or self.steps.dtype != torch.int64):
            raise ValueError(
                f"steps must be int64 of shape {tuple(self.log_ratio.shape)}, got {self.steps.dtype} of shape"
                f" {tuple(self.steps.shape)}"
            )
        self._remove_padding()
        for name, value in (("log_ratio", self.log_ratio), ("kappa", self.kappa)):
            if value is None:
                continue
            if value.shape != self.log_ratio.shape or value.dtype != torch.float64:
                raise ValueError(
                    f"{name} must be float64 of shape {tuple(self.log_ratio.shape)}, got {value.dtype} of shape"
                    f" {tuple(value.shape)}"
                )
            if value.requires_grad:
                raise ValueError(f"{name} requires a gradient, but a correction is data: detach it")
            good = value.isfinite() & (value >= 0) if name == "kappa" else value.isfinite()
            if not good.all():
                sample, step = good.logical_not().nonzero()[0].tolist()
                wanted = "finite and >= 0" if name == "kappa" else "finite"
                raise ValueError(
                    f"{name} must be {wanted}, got {value[sample, step].item()} in sample {sample}, step {step}"
                )

    def _remove_padding(self) -> None:
        """Set padded values to 0, which no sum notices, and `valid` to None if nothing is padded."""
        valid, shape = self.valid, self.log_ratio.shape
        if valid is None:
            return
        if valid.shape != shape or valid.dtype != torch.bool or not valid.any(dim=1).all():
            raise ValueError(
                f"valid must be bool of shape {tuple(shape)}, true somewhere in every sample, got {valid.dtype} of"
                f" shape {tuple(valid.shape)}"
            )
        if valid.all():
            object.__setattr__(self, "valid", None)
            return
        for name in ("log_ratio", "kappa"):
            if (value := getattr(self, name)) is not None and value.shape == shape:
                object.__setattr__(self, name, torch.where(valid, value, 0.0))

    @property
    def counted(self) -> Tensor:
        """(N, W) bool, True for the rows of samples."""
        return torch.ones_like(self.log_ratio, dtype=torch.bool) if self.valid is None else self.valid


@dataclass(frozen=True)
class Corrected:
    """The correction of N samples x W trained steps.

    `weight` (N, W) float64, 0 for masked rows; `unmasked` (N, W) the same before masks, 0 only outside `band`. `kept`
    (N, W) bool. `masked`: name of every active rule's setting to (N, W) bool, True for rows that this rule alone masks,
    regardless of other rules. `statistics`: the same names to (N, W) float64, the values that the rules bound: D kappa
    in nats for kappa_nats, L^2 for m2, exp(|L|) for k1, the statistics themselves for k2 and k3, the weight for band.
    `gamma` (N, W) float64: the tempering exponent of each row, 1 without tempering. `valid` as in `Drift`: in padded
    places all of them but gamma are 0 or False."""

    weight: Tensor
    unmasked: Tensor
    kept: Tensor
    masked: dict[str, Tensor]
    statistics: dict[str, Tensor]
    gamma: Tensor
    valid: Tensor | None = None

    def metrics(self) -> dict[str, Tensor]:
        """Return the values of each rule's metrics, float64 by name: the mean over rows, or the maximum for `.../max`.

        They are (N, W) without padding, else those of valid places alone."""
        found = {f"masked/{rule}": masked.double() for rule, masked in self.masked.items()}
        for rule, statistic in self.statistics.items():
            found |= {f"statistic/{rule}/mean": statistic, f"statistic/{rule}/max": statistic}
        return found if self.valid is None else {name: values[self.valid] for name, values in found.items()}


def padded(values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (T,) of N samples, one behind the other, as rows (N, W) padded with 0, and `valid` (N, W) bool.

    `lengths` (N,) are int64 with the sum T; W is the largest. rows[valid] are the values again, in order."""
    valid = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    return values.new_zeros(valid.shape).masked_scatter(valid, values), valid


def correct(drift: Drift, settings: Correction, num_elements: int) -> Corrected:
    """Return the settings' weights and masks of these rows; nothing is corrected in mode `none`.

    Rules are independent: each judges all rows, and a row stays if every rule keeps it. Rows whose weight `band` sets
    to 0 are masked. Tempering follows the rules: rows that they leave out do not affect its exponent. k1, k2, k3 and m2
    use the same L as the weights, per latent element with log_ratio `mean`; kappa_nats is always in nats.

    Args:
        drift: The rows; a whole update if `settings.needs_update`.
        settings: `algorithm.correction`.
        num_elements: D, the latent elements of a sample.

    Raises:
        ValueError: For settings that `correction_problems` refuses, and for kappa_nats without drift.kappa."""
    for problem in correction_problems(settings, ratio=False):
        raise ValueError(problem)
    log_ratio, valid = per_element(drift.log_ratio, settings, num_elements), drift.valid
    keep: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    if settings.kappa_nats is not None:
        if drift.kappa is None:
            raise ValueError(
                "algorithm.correction.kappa_nats needs drift.kappa, which takes the behaviour policy's means; there are"
                " none"
            )
        keep["kappa_nats"], statistics["kappa_nats"] = drift.kappa <= settings.kappa_nats, drift.kappa
    if settings.m2 is not None:
        keep["m2"], statistics["m2"] = m2po_mask(log_ratio, settings.m2, valid), log_ratio.square()
    if settings.k1 is not None:
        level = settings.reject_level_of("k1")
        keep["k1"], statistics["k1"] = k1_mask(log_ratio, settings.k1, level, valid)
    if settings.k2 is not None:
        level = settings.reject_level_of("k2")
        keep["k2"], statistics["k2"] = statistic_mask(log_ratio.square() / 2, settings.k2, level, valid)
    if settings.k3 is not None:
        level = settings.reject_level_of("k3")
        keep["k3"], statistics["k3"] = statistic_mask(log_ratio.expm1() - log_ratio, settings.k3, level, valid)
    kept = counted = drift.counted
    for own in keep.values():
        kept = kept & own
    weight, gamma = importance_weights(drift, settings, num_elements, kept)
    if settings.band is not None:
        keep["band"] = weight > 0
        statistics["band"] = exponents(drift, settings, num_elements, kept).exp()
        kept = kept & keep["band"]
    return Corrected(
        weight=torch.where(kept, weight, 0.0),
        unmasked=weight,
        kept=kept,
        masked={rule: counted & ~own for rule, own in keep.items()},
        statistics={
            rule: torch.where(counted, value.expand_as(weight).clamp(max=LARGEST), 0.0)
            for rule, value in statistics.items()
        },
        gamma=gamma,
        valid=valid,
    )


def normaliser(corrected: Corrected, settings: Correction, share: Tensor | None = None) -> tuple[float, float]:
    """Return (numerator, denominator); their quotient multiplies the mean over all rows of weight x loss.

    Both are sums over rows, so the sums of micro-batches add up to the update's. The numerator is the number of rows.
    The denominator counts the unmasked rows (`kept`) or all rows (`all`), each as 1, or as its weight if weights are
    normalised. The loss is thus the sum of weight x loss over the unmasked rows, divided by the denominator. So with
    `all` a masked row dilutes the loss by its unmasked weight (VeRL's batch normalisation, which has no masks).

    Args:
        corrected: the rows.
        settings: `algorithm.correction`.
        share: (N, W) float64, the coefficient of each row in a weighted mean over rows, such as 1 / length of its
            answer; a row counts as its share instead of 1. None: equal shares."""
    equal = share is None and corrected.valid is None
    share = torch.ones_like(corrected.weight) if share is None else share
    if corrected.valid is not None:
        share = torch.where(corrected.valid, share, 0.0)
    rows = float(share.numel()) if equal else share.sum().item()  # without waiting for the device
    if settings.normalises:
        return rows, (share * (corrected.weight if settings.denominator == "kept" else corrected.unmasked)).sum().item()
    return rows, (share * corrected.kept).sum().item() if settings.denominator == "kept" else rows


def loss_factor(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; 0 if the denominator is 0, because every row is masked."""
    return numerator / denominator if denominator > 0 else 0.0


def importance_weights(
    drift: Drift, settings: Correction, num_elements: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (weights w, gamma), both (N, W) float64, w = exp(clamp(gamma e, +-20)) with the `exponents` e of the rows.

    gamma is 1 unless weights are `tempered`: then it is the `tempering_exponent` of the rows that reach the loss, or 1
    without such rows. With tempering `step` each denoising step has an exponent for its rows. First weights outside
    `band` become 0 (IcePop). Then the others are truncated at `cap` and raised to `floor` (slime's TIS). `weights:
    none` gives ones. Rows that are not kept have weights like any other row.

    Clamping, truncating and raising keep the order of weights. They move those furthest from the others most, which
    cannot lower the effective sample size.

    Args:
        drift: L in nats; of a whole update for tempered weights, with `steps` for tempering `step`.
        settings: `algorithm.correction`.
        num_elements: D, the latent elements of a sample.
        kept: (N, W) bool, True for rows that the rules keep, no padded ones; None: all rows.

    Raises:
        ValueError: tempering per step without `drift.steps`."""
    gamma = torch.ones_like(drift.log_ratio)
    counted = drift.counted
    if settings.weights == "none":
        return counted.to(drift.log_ratio.dtype), gamma
    kept = counted if kept is None else kept
    values = exponents(drift, settings, num_elements, kept)
    if settings.weights == "tempered":
        for rows in _tempered_together(drift, settings):
            own = values[rows & kept]
            gamma[rows] = tempering_exponent(own, settings.ess_target) if own.numel() else 1.0
    weight = (gamma * values).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    outside = ~counted
    if settings.band is not None:
        low, high = settings.band
        outside = outside | (weight < low) | (weight > high)
    if settings.cap is not None:
        weight = weight.clamp(max=settings.cap)
    if settings.floor is not None:
        weight = weight.clamp(min=settings.floor)
    return torch.where(outside, 0.0, weight), gamma


def _tempered_together(drift: Drift, settings: Correction) -> list[Tensor]:
    """Return the sets of rows that share a tempering exponent, each (N, W) bool."""
    if settings.tempering == "update":
        return [torch.ones_like(drift.log_ratio, dtype=torch.bool)]
    if drift.steps is None:
        raise ValueError("algorithm.correction.tempering: step needs drift.steps, the denoising step of every row")
    counted = drift.counted
    return [counted & (drift.steps == step) for step in drift.steps[counted].unique()]


def exponents(drift: Drift, settings: Correction, num_elements: int, kept: Tensor) -> Tensor:
    """Return (N, W): L, or L / D with log_ratio `mean`, aggregated over a sample's steps, which share the result.

    Level `step` does not aggregate. `trajectory`: the sum over steps of L, but the mean over steps of L / D.
    `sequence`: the sum over steps of either; VeRL-Omni's level of that name uses L / D. With steps `kept` the sums and
    means are over the kept steps, 0 without such steps.

    Args:
        drift: L (N, W) in nats.
        settings: `algorithm.correction`.
        num_elements: D, the latent elements of a sample.
        kept: (N, W) bool, True for rows that the rules keep. Read only with steps `kept`."""
    values = per_element(drift.log_ratio, settings, num_elements)
    if settings.level == "step":
        return values
    over = kept if settings.steps == "kept" else drift.counted
    total = torch.where(over, values, 0.0).sum(dim=1, keepdim=True)
    if settings.level == "trajectory" and settings.log_ratio == "mean":
        total = total / over.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand_as(values)


def per_element(log_ratio: Tensor, settings: Correction, num_elements: int) -> Tensor:
    """Return L itself for log_ratio `sum`, L / D for `mean`.

    Args:
        log_ratio: L in nats, of any shape.
        settings: `algorithm.correction`.
        num_elements: D, the latent elements of a sample.

    Raises:
        ValueError: num_elements < 1."""
    if num_elements < 1:
        raise ValueError(f"num_elements must be >= 1, got {num_elements}")
    return log_ratio / num_elements if settings.log_ratio == "mean" else log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(L) - 1 - L of each L in nats, whose mean over rows of b estimates KL(b || p); exp(L) is at most e^20.

    (J. Schulman, "Approximating KL divergence"; VeRL's `k3_kl`.)"""
    return log_ratio.clamp(max=MAX_EXPONENT).expm1() - log_ratio


def chi2(log_ratio: Tensor) -> Tensor:
    """Return exp(2 L) - 1 of each L in nats, whose mean over rows of b estimates chi^2(p || b); exp(L) is at most e^20.

    With L of steps and of whole samples VeRL's `chi2_token` and `chi2_seq`. Exact weights of mean 1 have an effective
    sample size of 1 / (1 + chi^2)."""
    return (2 * log_ratio.clamp(max=MAX_EXPONENT)).expm1()


def perplexity_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(-L) for each sample's mean L over its steps, in nats, at most e^20: VeRL's `ppl_ratio`."""
    return (-log_ratio).clamp(max=MAX_EXPONENT).exp()


def interpolated_log_prob(
    behaviour: Tensor,
    current: Tensor,
    staleness: Tensor,
    nats: Tensor,
    interpolation: Literal["loglinear", "linear"] = "loglinear",
) -> Tensor:
    """Estimate the proximal policy's log-prob without a forward pass, from its place between the two policies.

    Both forms are AReaL's approximations of the decoupled loss (its `prox_approx_method`). With v the version in
    training and v_b the version that took the step, alpha = (v - 1 - v_b) / (v - v_b) = s / (s + 1), s = `staleness`.
    `loglinear`: log p = log b + alpha L, L = log theta - log b. `linear`: p = (1 - alpha) b + alpha theta, as densities
    of the whole sample: log p = log b + log(1 - alpha + alpha exp(L)), L in nats. AReaL's tokens are the steps here.

    With `linear` p / b >= 1 / (s + 1) and, for stale steps, theta / p <= (s + 1) / s, however far the policies are
    apart. The logarithm of the sum is computed relative to its larger term, so L may have any size.

    Args:
        behaviour: recorded log-probs, returned for steps of staleness 0; the mismatch of engine and trainer stays in
            the ratio.
        current: log-probs of the policy in training, of the same shape and unit.
        staleness: integers >= 0 of that shape, one per step, since versions may change in mid-trajectory.
        nats: nats of a whole sample per unit of the log-probs, of that shape, > 0; only `linear` reads it.
        interpolation: the form.

    Returns:
        Log-probs in shape and dtype of `behaviour`, detached from both.

    Raises:
        ValueError: shapes differ, or `staleness` has values other than integers >= 0."""
    for name, value in (("current", current), ("staleness", staleness), ("nats", nats)):
        if value.shape != behaviour.shape:
            raise ValueError(
                f"{name} must have shape {tuple(behaviour.shape)} like behaviour, got {tuple(value.shape)}"
            )
    if staleness.is_floating_point() or staleness.dtype == torch.bool:
        raise ValueError(f"staleness must be integers, got {staleness.dtype}")
    if (staleness < 0).any():
        raise ValueError(f"staleness must be >= 0, got {staleness.min().item()}")
    start, end, age = (value.detach().to(torch.float64) for value in (behaviour, current, staleness))
    if interpolation == "loglinear":
        return (start + age / (age + 1) * (end - start)).to(behaviour.dtype)
    per_unit = nats.detach().to(torch.float64)
    moved = torch.logaddexp(-age.log1p(), age.log() - age.log1p() + per_unit * (end - start))
    return (start + moved / per_unit).to(behaviour.dtype)
