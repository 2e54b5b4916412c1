"""Defines a rollout engine whose bfloat16 rounding error is amplified, so that a small model has a large one's nats.

A log-ratio of D latent elements has a standard deviation of f e, e being the rms error of the velocity and f a factor
that grows with sqrt(D). An error times sqrt(65 536 / 1 024) = 8 therefore gives a sample of 1 024 elements the
log-ratios of a sample of 65 536 elements.
"""

from __future__ import annotations

from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.payloads import Staged
from omni_async.types import WeightReport
from tests.support.amplifier import Amplifier


def amplified_engine(factor: float) -> type[DiffusersEngine]:
    """Return a class of engines whose rounding error is multiplied by `factor`; 0 is an engine without one."""

    class AmplifiedEngine(DiffusersEngine):
        def _load(self) -> None:
            super()._load()
            self._amplifiers = [Amplifier(module, factor) for module in self._components.values()]

        def _swap_in(self, staged: Staged) -> WeightReport:
            report = super()._swap_in(staged)
            for amplifier in self._amplifiers:
                amplifier.round()
            return report

    return AmplifiedEngine
