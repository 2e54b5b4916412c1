"""Defines a rollout engine whose bfloat16 rounding error is amplified, so that a small model has a large one's nats.

A log-ratio of D latent elements has a standard deviation of f e, e being the rms error of the velocity and f a factor
that grows with sqrt(D). An error times sqrt(65 536 / 1 024) = 8 therefore gives a sample of 1 024 elements the
log-ratios of a sample of 65 536 elements.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.payloads import Staged
from omni_async.types import WeightReport


class Amplifier:
    """Multiplies the distance of a denoiser in bfloat16 from float32 arithmetic on the same weights by `factor`.

    It hooks into the float32 denoiser `exact`, whose weights `round` replaces by values that bfloat16 can hold."""

    def __init__(self, exact: nn.Module, factor: float) -> None:
        self._exact, self._factor = exact, factor
        self._rounded = nn.Module.to(copy.deepcopy(exact), torch.bfloat16)
        exact.register_forward_hook(self._amplify, with_kwargs=True)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the weights of the float32 denoiser to the other, and leave their bfloat16 values in both."""
        for own, rounded in zip(self._exact.parameters(), self._rounded.parameters(), strict=True):
            rounded.copy_(own)
            own.copy_(rounded)

    def _amplify(self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> tuple[Tensor]:
        velocity: Tensor = self._rounded(**{name: _rounded(value) for name, value in inputs.items()})[0]
        return (output[0] + self._factor * (velocity.float() - output[0]),)


def _rounded(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


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
