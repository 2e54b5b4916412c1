"""Defines the interface of weight transports: four verbs on both sides.

Transports carry buckets without interpreting them; senders and receivers of the weights compare digests.

    verb      sender, next to trainer rank 0                  receiver, next to an engine
    init      connects the engines, also when they change     joins the sender that made the membership
    start     begins a version, whose manifest names every    prepares for a version
              tensor as `component.name`
    update    carries one bucket                              receives one bucket
    finish    waits until nothing is read any more            returns the version whole; its digest is checked, then
                                                              engines may swap

`sending` and `receive` call them in this order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket

Join = Callable[[Any], Awaitable[None]]


class TransportError(RuntimeError):
    """Weights could not be carried; names the version and the reason."""


@dataclass(frozen=True)
class Transfer:
    """The data that a receiver needs from its sender: the results of `start`, and of `update` for each bucket."""

    start: Any
    buckets: list[Any] = field(default_factory=list)


class WeightSender(Protocol):
    """A sender of one version at a time.

    Slow work happens off the event loop. `one_by_one`: each engine receives a version independently of the others;
    otherwise all receive it together, or none does."""

    one_by_one: bool

    async def init(self, engines: Mapping[str, Join]) -> None:
        """Connect all present engines, before the first version and again when engines come or go.

        `engines[name](membership)` makes that engine's receiver `init`. TransportError if one can't be reached."""

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> Any:
        """Begin a version, of buckets of `sizes` bytes. TransportError if it can't be sent."""

    async def update(self, bucket: Bucket, reference: Any | None) -> Any:
        """Carry the next bucket, or begin to if receivers must take part.

        `reference`: the bucket's in the run's store, if it is there already. TransportError if it can't be sent."""

    async def finish(self, delivered: bool) -> None:
        """End the version, whatever its outcome; its buckets are not read after that.

        `delivered`: all engines have it; otherwise further errors follow from the failure that ended it. TransportError
        if it could not be sent."""


class WeightReceiver(Protocol):
    async def init(self, membership: Any) -> None:
        """Join the sender that created `membership`."""

    async def start(self, manifest: WeightManifest, start: Any) -> None:
        """Prepare for a version; `start` is the result of the sender's `start`. TransportError if that fails."""

    async def update(self, bucket: Any) -> None:
        """Receive the next bucket; `bucket` is the result of the sender's `update`."""

    async def finish(self) -> tuple[WeightManifest, list[Bucket]]:
        """Return the version's buckets, and the manifest that describes their layout.

        It has the same tensors and digest as the manifest passed to `start`. The buckets may be read until the next
        `start`, and must not be written. LookupError, TransportError or WeightError if they can't be received."""


@asynccontextmanager
async def sending(
    sender: WeightSender, manifest: WeightManifest, buckets: Sequence[Bucket], references: Sequence[Any | None] = ()
) -> AsyncIterator[Transfer]:
    """Send a version; inside the context it can be received with the yielded `Transfer`.

    Args:
        sender: The transport's.
        manifest: The version's.
        buckets: Its bytes; not read after the context is left, when all engines have received it or the run fails.
        references: The buckets' references in the run's store, None for a bucket that is not there.

    Raises:
        TransportError: The version could not be sent.
    """
    try:
        transfer = Transfer(await sender.start(manifest, [len(bucket) for bucket in buckets]))
        for bucket, reference in zip_longest(buckets, references):
            transfer.buckets.append(await sender.update(bucket, reference))
        yield transfer
    except BaseException:
        await sender.finish(delivered=False)
        raise
    await sender.finish(delivered=True)


async def receive(
    receiver: WeightReceiver, manifest: WeightManifest, transfer: Transfer
) -> tuple[WeightManifest, list[Bucket]]:
    """Receive a version, as `WeightReceiver.finish` returns it.

    Args:
        receiver: the engine's, after it has joined the sender.
        manifest: the version's.
        transfer: yielded by `sending`.

    Raises:
        LookupError, TransportError, WeightError: the version cannot be received."""
    await receiver.start(manifest, transfer.start)
    for bucket in transfer.buckets:
        await receiver.update(bucket)
    return await receiver.finish()
