"""Keeps frozen models in host memory, and brings them to a device while they compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Offloaded:
    """Models that lie in host memory, and on `device` as well between `bring` and `release`.

    They must be frozen: what is on the device is dropped, not copied back."""

    def __init__(self, models: Iterable[nn.Module], device: torch.device | str) -> None:
        self._device = device
        self._there = False
        self._host: list[tuple[nn.Module, str, torch.Tensor]] = [
            (module, name, tensor)
            for model in models
            for module in model.to("cpu").modules()
            for kind in (module.named_parameters, module.named_buffers)
            for name, tensor in kind(recurse=False, remove_duplicate=False)
        ]

    @torch.no_grad()
    def bring(self) -> None:
        """Copy the models to the device, unless they are there."""
        if self._there:
            return
        moved: dict[int, torch.Tensor] = {}  # weights that are tied stay so
        for module, name, tensor in self._host:
            if id(tensor) not in moved:
                there = tensor.detach().to(self._device)
                moved[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
            setattr(module, name, moved[id(tensor)])
        self._there = True

    def release(self) -> None:
        """Leave the models to host memory alone."""
        if self._there:
            for module, name, tensor in self._host:
                setattr(module, name, tensor)
        self._there = False
