"""Stores values in Ray's object store.

A value is written to shared memory once, and read there by every process that has its reference.

Two costs are far higher than the cost of the bytes:
- Every object costs an exchange with the store's daemon, when it is stored and when it is read. So small values that
  are put together share an object, and concurrent reads of one process are combined.
- Pickling copies a tensor twice. So tensors travel as views of their memory, which Ray maps into the reader's process
  as it does with arrays.

Waits only for Ray, in threads, so the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import ray

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import Coalescer
from omni_async.store import ObjectLost, nbytes

# Values share an object up to this size: beyond it, copying takes longer than the exchange for an object.
_SHARED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """A reference to a value: its position `index` in an object of the store."""

    object: Any
    index: int


class RayStore:
    def __init__(self) -> None:
        # Reads block a thread and not the event loop, which Ray cannot distinguish.
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
        self._reads: Coalescer[Any, list[Any] | ray.exceptions.RayError] = Coalescer(
            lambda objects: in_daemon_thread(_read, objects)
        )

    async def put(self, value: Any) -> Place:
        (reference,) = await self.put_all([value])
        return reference

    async def put_all(self, values: Sequence[Any]) -> list[Place]:
        """Store values; consecutive values share objects."""
        shares = list(_shares(values))
        objects = await asyncio.gather(
            *(in_daemon_thread(ray.put, [_to_arrays(value) for value in share]) for share in shares)
        )
        return [Place(made, index) for made, share in zip(objects, shares, strict=True) for index in range(len(share))]

    async def get(self, reference: Place) -> Any:
        values = await self._reads.send(reference.object)
        if isinstance(values, ray.exceptions.RayError):
            raise ObjectLost(f"object {reference.object.hex()} is gone: {values}") from values
        return _to_tensors(values[reference.index])

    def __reduce__(self) -> tuple[Callable[[], RayStore], tuple[()]]:
        return RayStore, ()


def _shares(values: Sequence[Any]) -> Iterator[list[Any]]:
    share: list[Any] = []
    size = 0
    for value in values:
        more = _size(value)
        if share and size + more > _SHARED_BYTES:
            yield share
            share, size = [], 0
        share.append(value)
        size += more
    if share:
        yield share


def _size(value: Any) -> int:
    """Return the bytes of a value. A value that cannot be measured gets a separate object."""
    try:
        return nbytes(value)
    except (AttributeError, TypeError):
        return _SHARED_BYTES


def _read(objects: list[Any]) -> list[Any]:
    """Return the objects' values, or the error of each."""
    different = list(dict.fromkeys(objects))
    try:
        found = dict(zip(different, ray.get(different), strict=True))
    except ray.exceptions.RayError:
        found = {}
        for one in different:
            try:
                found[one] = ray.get(one)
            except ray.exceptions.RayError as error:
                found[one] = error
    return [found[one] for one in objects]


# ---- tensors as arrays -----------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor's bytes; numpy knows neither bfloat16 nor the shape () as a view."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: str
    shape: tuple[int, ...]


class _TensorDict(NamedTuple):
    leaves: dict[str, Any]
    batch_size: tuple[int, ...]


def _to_arrays(value: Any) -> Any:
    """Return a tensor, or a TensorDict of tensors, as views of its memory; any other value unchanged."""
    if type(value).__module__.partition(".")[0] not in ("torch", "tensordict"):
        return value
    import torch
    from tensordict import TensorDict

    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _Tensor(data, str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if type(value) is TensorDict:
        return _TensorDict({name: _to_arrays(leaf) for name, leaf in value.items()}, tuple(value.batch_size))
    return value


def _to_tensors(value: Any) -> Any:
    if isinstance(value, _Tensor):
        torch = _torch()
        dtype = getattr(torch, value.dtype)
        if value.data.size == 0:
            return torch.empty(value.shape, dtype=dtype)
        return torch.from_numpy(value.data).view(dtype).reshape(value.shape)
    if isinstance(value, _TensorDict):
        from tensordict import TensorDict

        return TensorDict({name: _to_tensors(leaf) for name, leaf in value.leaves.items()}, batch_size=value.batch_size)
    return value


@cache
def _torch() -> Any:
    """Import torch, and trigger unseen its one warning per process that it cannot prevent writes to read-only memory.

    `ObjectStore.get` forbids such writes."""
    import torch

    read_only = np.zeros(1, np.uint8)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(read_only)
    return torch
