"""Stores trajectories so that samples of a prompt share its conditioning, half of a trajectory or more.

Conditioning is a separate object in the store. Trajectories of one process with equal conditioning refer to the same
object, which lives as long as one of them, or until the process stores other prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from omni_async.aio.threads import in_daemon_thread
from omni_async.config.held import SHARED_BYTES
from omni_async.rollout.recent import Recent
from omni_async.store import ObjectStore, nbytes

if TYPE_CHECKING:
    from tensordict import TensorDict

_CONDITIONING = "conditioning"
# Samples of a prompt are generated one soon after the other, so a process needs the conditioning of few prompts.
_KEPT_BYTES = 128 * 2**20

Key = tuple[str, ...]  # of nested conditioning


class Parts(NamedTuple):
    """A reference to a trajectory: to its own tensors, and to the conditioning that it may share, by key."""

    own: Any
    shared: tuple[tuple[Key, Any], ...]


class Stored(NamedTuple):
    """A stored trajectory: its reference, its own bytes, and the names and bytes of the objects that it may share."""

    reference: Any
    nbytes: int
    shared: tuple[tuple[str, int], ...]


class _Object(NamedTuple):
    name: str
    reference: Any
    nbytes: int


class Trajectories:
    """The trajectories that one process, `name`, puts into the store."""

    def __init__(self, name: str, store: ObjectStore) -> None:
        self._name = name
        self._store = store
        self._numbers = count()
        self._kept: Recent[bytes, _Object] = Recent(_KEPT_BYTES, lambda one: one.nbytes)

    async def put_all(self, trajectories: Sequence[Any]) -> list[Stored]:
        """Store trajectories: TensorDicts, or anything else with `nbytes`, which shares nothing."""
        if not any(True for each in trajectories for _ in _conditioning(each)):
            references = await self._store.put_all(trajectories)
            return [Stored(one, nbytes(each), ()) for one, each in zip(references, trajectories, strict=True)]
        digests = await in_daemon_thread(lambda: [[*map(_digest, _conditioning(each))] for each in trajectories])
        parts = [[*zip(its, _conditioning(each), strict=True)] for its, each in zip(digests, trajectories, strict=True)]
        kept = {digest: self._kept.get(digest) for its in digests for digest in its}
        new = {digest: value for its in parts for digest, (_, value) in its if kept[digest] is None}
        own = [each.exclude(*(key for _, (key, _) in its)) for each, its in zip(trajectories, parts, strict=True)]
        references, *made = await asyncio.gather(self._store.put_all(own), *map(self._store.put, new.values()))
        objects = {digest: one for digest, one in kept.items() if one is not None}
        for (digest, value), reference in zip(new.items(), made, strict=True):
            objects[digest] = _Object(f"{self._name}.{next(self._numbers)}", reference, nbytes(value))
            self._kept.put(digest, objects[digest])
        return [
            Stored(
                Parts(reference, tuple((key, objects[digest].reference) for digest, (key, _) in its)),
                nbytes(tensors),
                tuple((objects[digest].name, objects[digest].nbytes) for digest, _ in its),
            )
            for reference, tensors, its in zip(references, own, parts, strict=True)
        ]


async def read_trajectory(store: ObjectStore, reference: Any) -> Any:
    """Return the trajectory that `Trajectories` stored. Its tensors may be shared: do not write to them.

    Raises ObjectLost if a part of it is gone."""
    if not isinstance(reference, Parts):
        return await store.get(reference)
    own, *values = await asyncio.gather(store.get(reference.own), *(store.get(one) for _, one in reference.shared))
    whole = own.copy()
    for (key, _), value in zip(reference.shared, values, strict=True):
        whole.set(key, value)
    return whole


def _conditioning(trajectory: Any) -> Iterator[tuple[Key, TensorDict]]:
    """Yield the trajectory's conditioning, or its calls', with their keys, if it is large enough to be shared."""
    if not hasattr(trajectory, "batch_size"):
        return
    for name, value in trajectory.items():
        if hasattr(value, "batch_size"):
            if name != _CONDITIONING:
                yield from (((name, *key), one) for key, one in _conditioning(value))
            elif nbytes(value) >= SHARED_BYTES:
                yield (name,), value


def _digest(found: tuple[Key, TensorDict]) -> bytes:
    """Return the digest of conditioning: names, dtypes, shapes and bytes."""
    import torch

    digest = xxhash.xxh3_128()
    for name, leaf in sorted(found[1].items(include_nested=True, leaves_only=True), key=lambda item: str(item[0])):
        digest.update(repr((name, leaf.dtype, tuple(leaf.shape))).encode())
        data: Any = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.digest()
