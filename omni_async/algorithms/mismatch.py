"""Judges the distance of engine and trainer, under the same weights and after updates. Imports no torch.

Both round, and their kernels differ, so the log-ratio between them is not 0. It is normal with mean -(f e)^2 / 2 and
variance (f e)^2 nats: e is the rms difference of the velocities, and f grows with the square root of a sample's latent
elements. At a published size, correct bfloat16 kernels differ by several nats, so no number of nats separates rounding
from a fault. The relative error of the velocity does. The share of rows outside the clip range shows whether rounding
matters.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from omni_async.config.algorithm import Correction, Reason, automatic_correction

# The largest relative error of a velocity that rounding explains. Measured on CPUs, guidance included: .5 to 3 % in
# bfloat16. A wrong schedule, time or guidance gives tens of per cent.
HONEST_ERROR = {"float32": 0.01, "bfloat16": 0.1}
# Above this share of fresh rows outside the clip range, the clip excludes rounding instead of drift
# (docs/algorithms/correction.md, bfloat16 engines).
CLIPPED_AT_MOST = 0.05
# Above this share of all rows outside the clip range, drift has left it. A log-ratio ~ N(-s^2 / 2, s^2) is beyond +-c
# nats in .18, .20 and .21 of the rows for c = .1, .66 and 1 where s = 3 c / 4. So this is the drift whose standard
# deviation is three quarters of the clip range (docs/algorithms/correction.md, which combination).
DRIFTED_AT_MOST = 0.2
DRIFT_UPDATES = 5  # the median of so many updates decides
# With a smaller share of fresh rows there may be only one or two, which prove nothing about the others.
_FRESH_ENOUGH = 0.5
_STEP = re.compile(r"engine_mismatch_nats/mean/step_(\d+)")


@dataclass(frozen=True)
class Mismatch:
    """The rows of staleness 0 of an update.

    mean, std: of their log-ratios L in nats, trainer to engine. steps: the same by denoising step, with std None for a
    single row. velocity: the relative rms error of the velocity; None for tokens, which have none. clipped: the share
    of rows that the clip range or a mask of the correction excludes, before any update."""

    mean: float
    std: float
    steps: Mapping[int, tuple[float, float | None]]
    velocity: float | None
    clipped: float

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Mismatch | None:
        """Read the mismatch from an update's metrics; None if no row was fresh, or the objective has no ratio."""
        name, clipped = "engine_mismatch_nats", "engine_mismatch_clipped"
        if not {f"{name}/mean", f"{name}/variance", clipped} <= metrics.keys():
            return None
        steps = {}
        for key in metrics:
            if (found := _STEP.fullmatch(key)) is not None:
                variance = metrics.get(key.replace("/mean/", "/variance/"))
                steps[int(found[1])] = metrics[key], None if variance is None else abs(variance) ** 0.5
        mean, variance = metrics[f"{name}/mean"], metrics[f"{name}/variance"]
        by_step = dict(sorted(steps.items()))
        velocity = metrics.get("engine_mismatch_velocity")
        return cls(mean, abs(variance) ** 0.5, by_step, velocity, metrics[clipped])

    @property
    def shown(self) -> str:
        """Return the numbers as text. Steps are listed only if rounding excludes rows."""
        by_step = ", ".join(
            f"step {step} {mean:.2g}" + (f" ± {std:.2g}" if std is not None else "")
            for step, (mean, std) in self.steps.items()
        )
        steps = f" ({by_step})" if by_step and self.clipped > 0 else ""
        velocity = "" if self.velocity is None else f", velocity error {self.velocity:.2g} of its rms"
        return (
            f"log-ratio {self.mean:.2g} ± {self.std:.2g} nats{steps}{velocity}, {self.clipped:.0%} of the rows outside"
            " the clip range before any update"
        )


@dataclass(eq=False)
class AutomaticCorrection:
    """Decides, from the metrics of finished updates, when mode `auto` leaves `bypass`. It leaves at most once.

    - `rounding`, judged once, by the first update whose rows are mostly fresh: more than `CLIPPED_AT_MOST` of the fresh
      rows are outside the clip range.
    - `drift`, judged only from then on, because rounding is part of a stale row's log-ratio. The measure is the share
      of all rows that is outside before the update moves them: the median of the last `DRIFT_UPDATES` updates exceeds
      `DRIFTED_AT_MOST`. A single update does not decide.

    It does not return to `bypass`: other modes do not measure that share. Their cost is a proximal pass, and without
    drift their weights are exact.

    judges_drift: False if the correction against drift, which needs the whole update, is ruled out."""

    judges_drift: bool = True
    reason: Reason | None = None
    _compared: bool = False
    _drift: deque[float] = field(default_factory=lambda: deque(maxlen=DRIFT_UPDATES))

    @property
    def correction(self) -> Correction:
        """Return the correction of the next update."""
        return automatic_correction(self.reason)

    def learn(self, metrics: Mapping[str, float]) -> str | None:
        """Process the metrics of a finished update. Return a sentence for the console if they decide something."""
        if self.reason is not None:
            return None
        found = Mismatch.of(metrics)
        compared = self._compared
        if found is not None and not compared and metrics["fresh_fraction"] >= _FRESH_ENOUGH:
            self._compared = True
            if found.clipped > CLIPPED_AT_MOST:
                self.reason = "rounding"
                return (
                    "algorithm.correction.mode auto becomes decoupled, ratios to the trainer's own policy, from the"
                    " next update on"
                )
        if self.judges_drift and self._compared and "drift_clipped" in metrics:
            self._drift.append(metrics["drift_clipped"])
            if len(self._drift) == DRIFT_UPDATES and (share := median(self._drift)) > DRIFTED_AT_MOST:
                self.reason = "drift"
                nats = abs(metrics.get("log_ratio_nats/variance", 0.0)) ** 0.5
                return (
                    "algorithm.correction.mode auto becomes decoupled with tempered weights from the next update on:"
                    f" {share:.0%} of the rows are outside the clip range before the update moves them (median of"
                    f" {DRIFT_UPDATES} updates, at most {DRIFTED_AT_MOST:.0%}); log-ratios spread by {nats:.2g} nats"
                )
        return None if compared == self._compared else "algorithm.correction.mode auto stays bypass"

    def state(self) -> dict[str, Any]:
        return {"reason": self.reason, "compared": self._compared, "drift": [*self._drift]}

    def restore(self, state: Mapping[str, Any], drift: bool = True) -> None:
        """Continue from a state. `drift`: whether what it found about drift still holds."""
        self._compared = state["compared"]
        if drift:
            self._drift.extend(state["drift"])
        if drift or state["reason"] == "rounding":
            self.reason = state["reason"]
