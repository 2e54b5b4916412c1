"""Computes one denoising step of a flow-matching sampler as a Gaussian policy: x' = mean + scale * noise.

Engines and trainer share this file.

Notation: x_sigma = (1 - sigma) x0 + sigma eps, the model predicts v = eps - x0, a step goes from `sigma` down to
`sigma_next`, h = sigma - sigma_next > 0. B rows, D latent elements per row, n = `noise_level`. Three kinds:

| kind  | origin                              | g (diffusion coefficient)   | std        | scale                     |
|-------|-------------------------------------|-----------------------------|------------|---------------------------|
| flow  | Flow-GRPO, arXiv 2505.05470         | n sqrt(sigma / (1 - sigma)) | g          | g sqrt(h)                 |
| dance | DanceGRPO, arXiv 2505.07818         | n                           | n sqrt(h)  | n sqrt(h)                 |
| cps   | Flow-CPS, arXiv 2509.05952          | -                           | = scale    | sigma_next sin(n pi / 2)  |

`std` is `std_dev_t` of the public references, and the divisor of the published KL; `scale` multiplies the noise. For
`flow` they differ by sqrt(h). A `flow` row with sigma exactly 1 uses sigma_max = sigmas[1] inside g, because
1 / (1 - 1) is undefined.

Every mean is linear, a x + b v. The per-row numbers a, b, std and scale are computed in float64 and rounded once.
Log-probs are float64, summed over latent elements in an order that depends on the row's length alone. So a row's result
does not depend on the rest of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("flow", "cps", "dance")

# Number of elements summed at a time: fewer than torch distributes over threads.
_PIECE = 2**14


@dataclass(frozen=True)
class Transition:
    """The Gaussian of a step in x's dtype: mean (B, ...), std (B,) as std_dev_t of the references, scale (B,) of x'.

    nats_per_velocity (B,) float64 is f = |b| sqrt(D) / scale. If velocities differ by an rms e, the log-ratio of the
    whole sample in nats is normal with mean -(f e)^2 / 2 and variance (f e)^2."""

    mean: Tensor
    std: Tensor
    scale: Tensor
    nats_per_velocity: Tensor


def transition(
    kind: str, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: Tensor
) -> Transition:
    """Return the Gaussian of x' given x and the velocity v.

    Args:
        kind: one of `KINDS`.
        x: (B, ...), float32 or float64.
        v: (B, ...), cast to x's dtype.
        sigma, sigma_next: (B,).
        sigma_max: (B,), sigmas[1] of each row's schedule.
        noise_level: (B,).

    Raises:
        ValueError: an unknown kind, a shape or dtype that does not fit, noise_level <= 0 (use `ode_step`), sigmas out
            of order, and for `cps` a scale that would not be positive (sigma_next = 0 or noise_level >= 2)."""
    _check_kind(kind)
    _check_shapes(x, v=v)
    rows = _rows64(x, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max, noise_level=noise_level)
    _check_rows(kind, rows)
    s, s_next, n = rows["sigma"], rows["sigma_next"], rows["noise_level"]
    if kind == "cps":
        angle = n * (math.pi / 2)
        std = scale = s_next * angle.sin()
        kept = s_next * angle.cos().abs()  # sqrt(sigma_next^2 - scale^2)
        of_x = (1 - s_next) + kept
        of_v = kept * (1 - s) - (1 - s_next) * s
    else:
        dt = s_next - s
        if kind == "flow":
            finite = torch.where(s == 1, rows["sigma_max"], s)
            g = n * (s / (1 - finite)).sqrt()
            std, scale = g, g * (-dt).sqrt()
        else:
            g = n
            std = scale = n * (-dt).sqrt()
        of_x = 1 + g.square() / (2 * s) * dt
        of_v = (1 + g.square() * (1 - s) / (2 * s)) * dt
    mean = x * _column(of_x, x) + v.to(x.dtype) * _column(of_v, x)
    nats_per_velocity = of_v.abs() * math.sqrt(math.prod(x.shape[1:])) / scale
    return Transition(mean, std.to(x.dtype), scale.to(x.dtype), nats_per_velocity)


def log_prob(kind: str, x_next: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return (B,) float64: the log-density of x' averaged, not summed, over its D elements.

    A log-ratio in nats is D times the difference of two log-probs (not for `cps`, see below). In float32 its error
    would be up to D 6e-8, .13 nats for the 2.1 million elements of a Wan2.2 video.

    `flow`, `dance`: < -(x' - mean)^2 / (2 scale^2) - ln scale - ln(2 pi) / 2 >. `cps`: < -(x' - mean)^2 >, as in its
    reference (arXiv 2509.05952). This is not a log-density; `nats_per_log_prob` makes ratios comparable again.

    Args:
        kind: one of `KINDS`.
        x_next: x' (B, ...), without gradient.
        mean: (B, ...), float32 or float64.
        scale: (B,), must be > 0.

    Raises:
        ValueError: an unknown kind, or a shape or dtype that does not fit."""
    _check_kind(kind)
    _check_shapes(mean, x_next=x_next)
    scale = _rows64(mean, scale=scale)["scale"]
    squares = (x_next.detach().to(mean.dtype) - mean).square().flatten(1)
    mean_square = _row_sums(squares) / squares.shape[1]
    if kind == "cps":
        return -mean_square
    return -mean_square / (2 * scale.square()) - scale.log() - 0.5 * math.log(2 * math.pi)


def log_prob_by_part(
    kind: str, x_next: Tensor, mean: Tensor, scale: Tensor, parts: Iterable[slice]
) -> tuple[Tensor, ...]:
    """Return the `log_prob` (B,) float64 of each part of the latents.

    Args:
        kind, x_next, mean, scale: as in `log_prob`, with its errors.
        parts: non-empty slices of the first axis of a row."""
    return tuple(log_prob(kind, x_next[:, part], mean[:, part], scale) for part in parts)


def nats_per_log_prob(kind: str, scale: Tensor, num_elements: int) -> Tensor:
    """Return (B,) f such that f * (log_prob - old_log_prob) is the log-ratio of the whole sample in nats.

    f is D, for `cps` D / (2 scale^2).

    Args:
        kind: one of `KINDS`.
        scale: (B,), the transition's.
        num_elements: D.

    Raises:
        ValueError: an unknown kind, or D < 1."""
    _check_kind(kind)
    if num_elements < 1:
        raise ValueError(f"num_elements must be >= 1, got {num_elements}")
    if kind == "cps":
        return num_elements / (2 * scale.square())
    return torch.full_like(scale, num_elements)


def ode_step(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Take the noise-free Euler step x' = x + (sigma_next - sigma) v, (B, ...) in x's dtype.

    Args:
        x, v, sigma, sigma_next: as in `transition`.

    Raises:
        ValueError: a shape or dtype that does not fit."""
    _check_shapes(x, v=v)
    rows = _rows64(x, sigma=sigma, sigma_next=sigma_next)
    return x + v.to(x.dtype) * _column(rows["sigma_next"] - rows["sigma"], x)


def take_step(
    kind: str,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x', log_prob, mean) with x' = mean + scale * noise; log_prob (B,) float64, the others in x's dtype.

    Args:
        kind, x, v, sigma, sigma_next, sigma_max, noise_level: as in `transition`, with its errors.
        noise: (B, ...), standard normal."""
    _check_shapes(x, noise=noise)
    step = transition(kind, x, v, sigma, sigma_next, sigma_max, noise_level)
    x_next = step.mean + noise.to(x.dtype) * _column(step.scale, x)
    return x_next, log_prob(kind, x_next, step.mean, step.scale), step.mean


def step_mixed(
    kind: str,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    noise: Tensor,
    noisy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x', log_prob, mean) of rows that are noisy or not.

    Noisy rows use `take_step`, the others `ode_step` with log_prob 0 and mean = x'. Dtypes are as in `take_step`.

    Args:
        kind, x, v, sigma, sigma_next, sigma_max: as in `transition`, with its errors.
        noise_level, noise: as in `take_step`. The values of an ODE row are never read (0 and NaN are allowed).
        noisy: (B,) bool."""
    _check_kind(kind)
    _check_shapes(x, noise=noise)
    if noisy.dtype != torch.bool or noisy.shape != x.shape[:1]:
        raise ValueError(
            f"noisy must be bool of shape {tuple(x.shape[:1])}, got {noisy.dtype} of shape {tuple(noisy.shape)}"
        )
    _rows64(x, sigma_max=sigma_max, noise_level=noise_level)
    x_next = mean = ode_step(x, v, sigma, sigma_next)
    log_probs = x.new_zeros(x.shape[0], dtype=torch.float64)
    rows = noisy.nonzero().squeeze(1)
    if len(rows) == 0:
        return x_next, log_probs, mean
    own = take_step(
        kind, x[rows], v[rows], sigma[rows], sigma_next[rows], sigma_max[rows], noise_level[rows], noise[rows]
    )
    return x_next.index_copy(0, rows, own[0]), log_probs.index_copy(0, rows, own[1]), mean.index_copy(0, rows, own[2])


def _row_sums(values: Tensor) -> Tensor:
    """Return the sums (B,) float64 of values (B, D).

    Pieces of a row are summed first. Torch would split a single long row over its threads, but sum each of several rows
    in one part, with other rounding."""
    count = values.shape[1] // _PIECE
    pieces = values[:, : count * _PIECE].unflatten(1, (count, _PIECE)).sum(dim=2, dtype=torch.float64)
    rest = values[:, count * _PIECE :].sum(dim=1, keepdim=True, dtype=torch.float64)
    return torch.cat([pieces, rest], dim=1).sum(dim=1)


def _column(per_row: Tensor, x: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ...), in x's dtype."""
    return per_row.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"sde kind: expected one of {list(KINDS)}, got {kind!r}")


def _check_shapes(x: Tensor, **others: Tensor) -> None:
    if x.ndim < 2 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"latents must be float32 (or float64) of shape (B, ...), got {x.dtype} of shape {tuple(x.shape)}"
        )
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} must have shape {tuple(x.shape)} like the latents, got {tuple(other.shape)}")


def _rows64(x: Tensor, **rows: Tensor) -> dict[str, Tensor]:
    for name, row in rows.items():
        if row.shape != x.shape[:1]:
            raise ValueError(f"{name} must have shape {tuple(x.shape[:1])}, a number per row, got {tuple(row.shape)}")
    return {name: row.to(torch.float64) for name, row in rows.items()}


def _check_rows(kind: str, rows: dict[str, Tensor]) -> None:
    s, s_next, s_max, n = rows["sigma"], rows["sigma_next"], rows["sigma_max"], rows["noise_level"]
    good = {
        ("noise_level", "finite and > 0; a noise-free row is an ode_step"): (n > 0) & n.isfinite(),
        ("sigma", "in (0, 1]"): (s > 0) & (s <= 1),
        ("sigma_next", "in [0, sigma)"): (s_next >= 0) & (s_next < s),
    }
    if kind == "flow":
        good["sigma_max", "sigmas[1], in (0, 1), on a row where sigma is 1"] = (s != 1) | ((s_max > 0) & (s_max < 1))
    if kind == "cps":
        good["sigma_next", "> 0 for kind 'cps', whose scale is 0 there"] = s_next != 0
        good["noise_level", "< 2 for kind 'cps', whose scale is sigma_next sin(noise_level pi / 2)"] = n < 2
    if torch.stack(list(good.values())).all():  # one device synchronisation when all is well
        return
    for (name, wanted), rows_good in good.items():
        if not rows_good.all():
            row = int(rows_good.logical_not().nonzero()[0])
            raise ValueError(f"{name} must be {wanted}, got {rows[name][row].item()} in row {row}")
