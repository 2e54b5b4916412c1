"""Amplifies the bfloat16 rounding error of a small denoiser to the log-ratios of a large one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


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
