"""Judges the mismatch of engine and trainer under the same weights. Imports no torch.

Both round, and their kernels differ, so the log-ratio between them is not 0. It is normal with mean -(f e)^2 / 2 and
variance (f e)^2 nats: e is the rms difference of the velocities, and f grows with the square root of a sample's latent
elements. At a published size, correct bfloat16 kernels differ by several nats, so no number of nats separates rounding
from a fault. The relative error of the velocity does. The share of rows outside the clip range shows whether rounding
matters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The largest relative error of a velocity that rounding explains. Measured on CPUs, guidance included: .5 to 3 % in
# bfloat16. A wrong schedule, time or guidance gives tens of per cent.
HONEST_ERROR = {"float32": 0.01, "bfloat16": 0.1}
# Above this share of fresh rows outside the clip range, the clip excludes rounding instead of drift
# (docs/algorithms/correction.md, bfloat16 engines).
CLIPPED_AT_MOST = 0.05
_STEP = re.compile(r"engine_mismatch_nats/mean/step_(\d+)")


@dataclass(frozen=True)
class Mismatch:
    """The rows of staleness 0 of an update.

    mean, std: of their log-ratios L in nats, trainer to engine. steps: the same by denoising step, with std None for a
    single row. velocity: the relative rms error of the velocity. clipped: the share of rows that the clip range or a
    mask of the correction excludes, before any update."""

    mean: float
    std: float
    steps: Mapping[int, tuple[float, float | None]]
    velocity: float
    clipped: float

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Mismatch | None:
        """Read the mismatch from an update's metrics; None if no row was fresh, or the objective has no ratio."""
        name, rest = "engine_mismatch_nats", ("engine_mismatch_velocity", "engine_mismatch_clipped")
        if not {f"{name}/mean", f"{name}/variance", *rest} <= metrics.keys():
            return None
        steps = {}
        for key in metrics:
            if (found := _STEP.fullmatch(key)) is not None:
                variance = metrics.get(key.replace("/mean/", "/variance/"))
                steps[int(found[1])] = metrics[key], None if variance is None else abs(variance) ** 0.5
        mean, variance = metrics[f"{name}/mean"], metrics[f"{name}/variance"]
        by_step = dict(sorted(steps.items()))
        return cls(mean, abs(variance) ** 0.5, by_step, *(metrics[key] for key in rest))

    @property
    def shown(self) -> str:
        """Return the numbers as text. Steps are listed only if rounding excludes rows."""
        by_step = ", ".join(
            f"step {step} {mean:.2g}" + (f" ± {std:.2g}" if std is not None else "")
            for step, (mean, std) in self.steps.items()
        )
        steps = f" ({by_step})" if by_step and self.clipped > 0 else ""
        return (
            f"log-ratio {self.mean:.2g} ± {self.std:.2g} nats{steps}, velocity error {self.velocity:.2g} of its"
            f" rms, {self.clipped:.0%} of the rows outside the clip range before any update"
        )
