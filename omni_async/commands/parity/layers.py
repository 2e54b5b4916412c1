"""Finds the first difference between two denoisers' first calls: an argument, or otherwise a layer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Call:
    """The first call of each of some denoisers: `arguments` by name, and every layer's output in the order of use."""

    def __init__(self) -> None:
        self.arguments: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}


@contextlib.contextmanager
def recorded(denoisers: Mapping[str, nn.Module]) -> Iterator[Call]:
    """Record the first calls during the block, as `component.layer`."""
    call, handles = Call(), []
    for component, denoiser in denoisers.items():
        handles.append(denoiser.register_forward_pre_hook(_arguments(call, component, denoiser), with_kwargs=True))
        for name, layer in denoiser.named_modules():
            handles.append(layer.register_forward_hook(_output(call, f"{component}.{name}".rstrip("."))))
    try:
        yield call
    finally:
        for handle in handles:
            handle.remove()


def first_difference(expected: Call, got: Call, bound: float) -> str:
    """Describe the first difference of the second call from the first by more than `bound`."""
    for name, wanted in expected.arguments.items():
        if (why := _differs(wanted, got.arguments.get(name), bound)) is not None:
            return f"first difference: the denoiser's argument {name!r}, {why}"
    for name, wanted in expected.outputs.items():
        if name in got.outputs and (why := _differs(wanted, got.outputs[name], bound)) is not None:
            return f"first difference: layer {name}, {why}"
    return "the first call of the denoiser agrees, layer by layer: look at what is made of its output (sign, guidance)"


def _differs(wanted: Tensor, got: Tensor | None, bound: float) -> str | None:
    if got is None:
        return "which is not given"
    if wanted.ndim and wanted.shape[1:] == got.shape[1:] and len(wanted) == 2 * len(got):
        # A pipeline may compute both branches of guidance in one batch; the policy computes them one by one.
        return min((_differs(half, got, bound) for half in wanted.chunk(2)), key=lambda why: why is not None)
    if wanted.shape != got.shape:
        return f"of shape {tuple(got.shape)} in place of {tuple(wanted.shape)}"
    off = float((wanted.double() - got.double()).abs().max()) if wanted.numel() else 0.0
    return f"off by {off:.1e}" if not off <= bound else None


def _arguments(call: Call, component: str, denoiser: nn.Module) -> Any:
    # The class's own signature: diffusers wraps `forward`, whose wrapper keeps it.
    signature = inspect.signature(denoiser.forward)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(name.startswith(f"{component}.") for name in call.arguments):
            return
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if (tensor := _tensor(value)) is not None:
                call.arguments[f"{component}.{name}"] = tensor

    return hook


def _output(call: Call, name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output  # an engine's layers also return their bias
        if name not in call.outputs and (tensor := _tensor(first)) is not None:
            call.outputs[name] = tensor

    return hook


def _tensor(value: Any) -> Tensor | None:
    """Return a copy of a tensor, or of all tensors in a sequence, one after the other."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value):
        return torch.cat([one.detach().flatten() for one in value])
    return None
