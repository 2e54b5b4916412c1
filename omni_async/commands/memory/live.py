"""Counts the bytes of tensors that live at once while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of operations' results on `device` inside the context.

    A storage counts once, however many views it has, until its last tensor is gone. Memory from before, and a kernel's
    temporary memory, do not count.
    peak: the largest number of live bytes."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._live = 0
        self._known: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in (results,) if isinstance(results, Tensor) else tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
                    self._count(storage, storage._cdata in given)
        return results

    def _count(self, storage: torch.UntypedStorage, from_before: bool) -> None:
        """Count a storage until it is gone; an argument from before the context counts as zero."""
        key, size = storage._cdata, 0 if from_before else storage.nbytes()
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
