"""Counts the floating-point operations of a rank's denoisers, and lists the peak performance of accelerators.

The convention is model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B):

- A multiplication and an addition are two operations.
- A forward pass counts once; a backward pass counts twice more through trained weights, and once more through frozen
  weights (LoRA).
- The recomputation of gradient checkpointing does not count.

The counted operations have formulas in torch (`torch.utils.flop_counter`): matrix products, convolutions, attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from omni_async.tokens.policy import Packed

_ATEN = torch.ops.aten
# Attention on CPUs and on accelerators of other makers; torch has no formulas for it.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _ATEN._scaled_dot_product_fused_attention_overrideable: sdpa_flop,
}

# bfloat16 TFLOP/s of dense matrix products, by torch's name of the device, from the makers' data sheets. These often
# print twice as much, for sparse products. The first entry that the name contains counts.
_PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200", 989.4),  # and GH200
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 311.9),
    ("A800", 311.9),
    ("L40S", 362.1),
    ("L40", 181.0),
    ("L4", 121.0),
    ("MI300X", 1307.4),
    ("MI325X", 1307.4),
)


class FlopMeter:
    """The operations of one rank's denoisers since the last `take`, in FLOPs of the module's convention.

    The first forward pass of every shape is counted operation by operation, which takes some microseconds per
    operation; later passes reuse the count. Compiled layers run uncompiled in that first pass.

    Args:
        components: The denoisers by component; hooks are added to each.
        backward: The count of a backward pass, in forward passes.
        compiled: Whether their layers are compiled.
    """

    def __init__(self, components: Mapping[str, nn.Module], backward: int, compiled: bool = False) -> None:
        self._backward = backward
        self._compiled = compiled
        self._known: dict[tuple[Any, ...], int] = {}
        self._counting: tuple[ExitStack, _Counter] | None = None
        self._key: tuple[Any, ...] = ()
        self.flops = 0
        for name, component in components.items():
            component.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            component.register_forward_hook(self._end, always_call=True)

    def take(self) -> int:
        """Return the operations since the last call."""
        flops, self.flops = self.flops, 0
        return flops

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Under LoRA the reference policy computes without adapters, and without gradient.
        self._key = (name, torch.is_grad_enabled(), *map(_shape, tree_leaves((args, kwargs))))
        if self._key not in self._known:
            contexts, counter = ExitStack(), _Counter()
            if self._compiled:
                # A layer compiled while its operations are counted would stay uncompiled forever.
                contexts.enter_context(torch.compiler.set_stance("force_eager"))
            contexts.enter_context(counter)
            self._counting = contexts, counter

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._counting is not None:
            (contexts, counter), self._counting = self._counting, None
            contexts.close()
            if output is None:
                return  # the forward pass failed, so its count is incomplete
            self._known[self._key] = counter.flops
        self.flops += self._known[self._key] * (1 + self._backward * torch.is_grad_enabled())


class _Counter(TorchDispatchMode):
    """The operations of torch calls in its context.

    torch's own FlopCounterMode also counts per module, with hooks on all modules of the process. It would include other
    threads if engines and trainer share a process."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _shape(leaf: Any) -> Any:
    """Return the key of an argument: a tensor's shape, a plain value itself, or the type of anything else.

    The key of a row of tokens has the shapes of its tensors."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape
    if isinstance(leaf, Packed):
        return tuple(map(_shape, tree_leaves(vars(leaf))))
    return leaf if isinstance(leaf, bool | int | str) else type(leaf)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak TFLOP/s of a device in `dtype`; None if it is unknown, as on a CPU."""
    device_name = getattr(torch.get_device_module(device), "get_device_name", None)
    if device_name is None or dtype != torch.bfloat16:
        return None
    name = device_name(device)
    return next((peak for known, peak in _PEAKS if known in name), None)
