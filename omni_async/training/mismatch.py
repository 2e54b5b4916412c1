"""Records the mismatch of engine and trainer under the same weights, due to precision, kernels, or a fault.

Only rows of staleness 0 in an update's first optimizer step show it; in all other rows the policy has moved on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.training.device import send
from omni_async.training.metrics import Metrics

# An objective's metrics of rows that do not contribute to the gradient.
EXCLUDED = ("clipped_low", "clipped_high", "dual_clipped", "dropped")


@dataclass(frozen=True)
class Rows:
    """R rows under engine and trainer.

    nats (R,) float64: L, the log-ratio of the whole sample, trainer to engine.
    nats_per_velocity (R,) float64: f of the rows' transitions (`omni_async.diffusion.sde.transitions.Transition`).
    velocity (R, ...): the trainer's.
    num_elements: D, the latent elements of a sample.
    steps: the denoising step of each row.
    fresh: the numbers of the rows of staleness 0."""

    nats: Tensor
    nats_per_velocity: Tensor
    velocity: Tensor
    num_elements: int
    steps: list[int]
    fresh: list[int]


def record_mismatch(metrics: Metrics, rows: Rows, clipped: Tensor) -> None:
    """Record the rows of staleness 0.

    Args:
        metrics: the metrics to record in.
        rows: the rows of a micro-batch.
        clipped: (R,), 1 for rows that the clip range or the correction excludes."""
    of_fresh = torch.zeros_like(rows.nats)
    fresh = send(torch.tensor(rows.fresh, dtype=torch.int64), rows.nats.device)
    of_fresh[fresh] = rows.nats[fresh]
    metrics.record("engine_mismatch_nats", of_fresh, "absmax")
    metrics.record("engine_mismatch", of_fresh / rows.num_elements, "absmax")
    metrics.record("fresh_fraction", torch.zeros_like(rows.nats).index_fill(0, fresh, 1.0))
    if not rows.fresh:
        return
    nats, steps = rows.nats[fresh], [rows.steps[row] for row in rows.fresh]
    metrics.record("engine_mismatch_nats/mean", nats)
    metrics.record_by_step("engine_mismatch_nats/mean", nats, steps, "mean")
    metrics.record("engine_mismatch_nats/variance", nats, "variance")
    metrics.record_by_step("engine_mismatch_nats/variance", nats, steps, "variance")
    metrics.record("engine_mismatch_velocity", velocity_errors(rows)[fresh], "rms")
    metrics.record("engine_mismatch_clipped", clipped[fresh])


def velocity_errors(rows: Rows) -> Tensor:
    """Estimate e / rms(v) of each row from its L alone: (R,) float64, whose rms over rows is the relative error.

    L ~ N(-q / 2, q) with q = (f e)^2, so <L^2> = q + q^2 / 4 and q = 2 (sqrt(1 + <L^2>) - 1). A row's own L^2 in place
    of the expectation is exact for small and for large q. At worst, near q = 3, e is 10 % too small."""
    squares = rows.nats.square()
    q = 2 * squares / (squares.add(1).sqrt() + 1)  # this form keeps the digits of a small L
    rms = rows.velocity.detach().square().flatten(1).mean(dim=1, dtype=torch.float64).sqrt()
    per_unit = rows.nats_per_velocity * rms
    return torch.where(per_unit > 0, q.sqrt() / per_unit, 0.0)


def clipped_rows(metrics: Mapping[str, Tensor], weight: Tensor | None, like: Tensor) -> Tensor:
    """Return 1 for rows that are outside an objective's clip range, dropped by it or masked, else 0: (R,).

    Args:
        metrics: the objective's, each (R,).
        weight: (R,), the correction's; None: no correction.
        like: (R,), with the result's dtype and device."""
    found = torch.zeros_like(like, dtype=torch.bool) if weight is None else weight == 0
    for name in EXCLUDED:
        if name in metrics:
            found = found | (metrics[name] > 0)
    return found.to(like.dtype)
