"""Runs model code on the meta device, where tensors have shapes and no values.

Code that reads values needs some: a small tensor computed only from values keeps its own, on the CPU (masks, positions,
schedules). A value read from any other tensor is 1. Attention counts as a fused kernel, which stores no matrix of
scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
_FEW = 4096
_ATEN = torch.ops.aten
_FUSED = F.scaled_dot_product_attention


@contextmanager
def symbolic() -> Iterator[None]:
    """Let code inside the context run on the meta device."""
    # A mode for torch's functions would not apply during backward, when checkpointed layers run again.
    with patch.object(F, _FUSED.__name__, _attention), _Symbolic():  # type: ignore[no-untyped-call]
        yield


class _Symbolic(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is _ATEN.equal.default and any(one.is_meta for one in args):
            return True
        if func is _ATEN.index.Tensor:
            args = (args[0], [_positions(index) for index in args[1]])
        inputs = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        on_meta = [one.is_meta for one in inputs]
        if any(on_meta) and not all(on_meta):
            args, given = tree_map(_without_values, (args, given))
        if given.get("device") is not None:
            # A copy to the host has no values either; a result computed from values has values.
            given["device"] = META if any(on_meta) else torch.device("cpu")
        results = func(*args, **given)
        return _kept(results) if isinstance(results, Tensor) else tree_map(_kept, results)


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device=META) if isinstance(value, Tensor) and not value.is_meta else value


def _kept(value: Any) -> Any:
    """Return a result, without its values if it has more than `_FEW` elements."""
    if not isinstance(value, Tensor) or value.is_meta or value.numel() <= _FEW:
        return value
    return torch.empty_like(value, device=META)


def _positions(index: Tensor | None) -> Tensor | None:
    """Return the positions that a mask selects; a mask without values selects all."""
    if index is None or index.dtype != torch.bool:
        return index
    if index.dim() != 1:
        raise ValueError("its memory is not known: a mask of several dimensions selects no known number")
    return torch.arange(len(index)) if index.is_meta else index.nonzero()[:, 0]


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not query.is_meta:
        return _FUSED(query, key, value, *args, **kwargs)
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    """Attention with the memory of FlashAttention: keeps inputs, output and a number per query for the gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
