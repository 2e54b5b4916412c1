"""Keeps frozen models in host memory, and copies them to a device while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from omni_async.types import WeightManifest
from omni_async.weights.buckets import ALIGNMENT, BucketSet, unpack
from omni_async.weights.digest import Bucket

# The allocator of pinned memory rounds every block up to a power of two: few large blocks waste little.
_BLOCK_BYTES = 2**31


class Offloaded:
    """Models in host memory, and also on `device` between `bring` and `release`.

    They must be frozen: the copies on the device are dropped, not copied back. For an accelerator their host memory
    is pinned, once, because a device reads pinned memory several times as fast; `allocate(nbytes)` replaces that
    memory."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        device: torch.device | str,
        allocate: Callable[[int], Bucket] | None = None,
    ) -> None:
        self._device = device
        self._there = False
        models = list(models)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if allocate is None and accelerator is not None and torch.device(device).type == accelerator.type:
            allocate = _pinned
        if allocate is None:
            models = [model.to("cpu") for model in models]
        else:
            _move([tensor for model in models for tensor in (*model.parameters(), *model.buffers())], allocate)
        self._host: list[tuple[nn.Module, str, torch.Tensor]] = [
            (module, name, tensor)
            for model in models
            for module in model.modules()
            for kind in (module.named_parameters, module.named_buffers)
            for name, tensor in kind(recurse=False, remove_duplicate=False)
        ]

    @torch.no_grad()
    def bring(self) -> None:
        """Copy the models to the device, unless they are there."""
        if self._there:
            return
        self._there = True
        moved: dict[int, torch.Tensor] = {}  # tied weights stay tied
        try:
            for module, name, tensor in self._host:
                if id(tensor) not in moved:
                    there = tensor.detach().to(self._device, non_blocking=True)
                    moved[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
                setattr(module, name, moved[id(tensor)])
        except BaseException:  # the device has no room for all of them: leave none there
            self.release()
            raise

    def release(self) -> None:
        """Drop the copies on the device."""
        if self._there:
            for module, name, tensor in self._host:
                setattr(module, name, tensor)
        self._there = False


def _pinned(nbytes: int) -> Bucket:
    memory: Bucket = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


@torch.no_grad()
def _move(tensors: Iterable[torch.Tensor], allocate: Callable[[int], Bucket]) -> None:
    """Move tensors, on any device, with their contents into memory of `allocate`."""
    once = {id(tensor): tensor for tensor in tensors}  # several models may share some
    total = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in once.values())
    blocks = BucketSet(min(_BLOCK_BYTES, max(1, total)), allocate)
    blocks.fill((str(key), tensor) for key, tensor in once.items())
    placed = unpack(WeightManifest(0, "full", "", blocks.specs), blocks.buckets)
    for tensor, (_, place) in zip(once.values(), placed, strict=True):
        tensor.data = place
