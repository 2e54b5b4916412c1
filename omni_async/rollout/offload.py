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
        self._there = True
        moved: dict[int, torch.Tensor] = {}  # weights that are tied stay so
        try:
            for module, name, tensor in self._host:
                if id(tensor) not in moved:
                    there = tensor.detach().to(self._device)
                    moved[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
                setattr(module, name, moved[id(tensor)])
        except BaseException:  # the device has no room for all of them: leave none there
            self.release()
            raise

    def release(self) -> None:
        """Leave the models to host memory alone."""
        if self._there:
            for module, name, tensor in self._host:
                setattr(module, name, tensor)
        self._there = False
