"""Counts bytes and elements of modules, tied weights once, and truncates repeated layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from torch import Tensor, nn


def nbytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))


def numel(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements of parameters."""
    return sum(parameter.numel() for parameter in parameters)


class Layers:
    """The repeated layers of components, as runs of equal layers that can be truncated.

    Each of many equal layers adds the same amount of memory, so a few layers of each run are enough to measure it."""

    _KEPT = 2

    def __init__(self, components: Iterable[nn.Module]) -> None:
        self._runs: list[tuple[nn.ModuleList, list[nn.Module]]] = []
        lists = [part for component in components for part in component.children() if isinstance(part, nn.ModuleList)]
        for layers in lists:
            self._runs += [(layers, list(run)) for _, run in groupby(layers, _signature)]

    def extrapolated(self, measure: Callable[[], int]) -> int:
        """Return the value of `measure` for the whole components, extrapolated from few layers and one more per run."""
        whole = [len(run) for _, run in self._runs]
        few = [min(self._KEPT, length) for length in whole]
        try:
            self._cut(few)
            measure()  # a model's first call may fill its caches
            base = total = measure()
            for number, (kept, length) in enumerate(zip(few, whole, strict=True)):
                if length > kept:
                    self._cut([n + (i == number) for i, n in enumerate(few)])
                    total += (length - kept) * (measure() - base)
        finally:
            self._cut(whole)
        return total

    def _cut(self, lengths: list[int]) -> None:
        kept: dict[nn.ModuleList, list[nn.Module]] = {}
        for (layers, run), length in zip(self._runs, lengths, strict=True):
            kept.setdefault(layers, []).extend(run[:length])
        for layers, remaining in kept.items():
            layers._modules.clear()
            layers.extend(remaining)


def _signature(layer: nn.Module) -> tuple[object, ...]:
    return type(layer).__name__, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())
