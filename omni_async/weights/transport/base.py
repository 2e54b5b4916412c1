"""Defines the interface of weight transports: four verbs on both sides.

Transports carry buckets without interpreting them; senders and receivers of the weights compare digests.

    verb      sender, beside trainer rank 0                   receiver, beside an engine
    init      meets the engines, and again when they change   joins the sender that wrote the invitation
    start     begins a version, whose manifest names every    prepares for a version
              tensor as `component.name`
    update    carries one bucket                              takes one bucket in
    finish    waits until nothing is read any more            returns the version whole; its digest is checked, then
                                                              engines may swap

`sending` and `receive` say them in this order.
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
    """Weights could not be carried: names the version, and the reason."""


@dataclass(frozen=True)
class Parcel:
    """What a receiver needs of its sender: what `start` returned, and `update` for each bucket."""

    start: Any
    buckets: list[Any] = field(default_factory=list)


class WeightSender(Protocol):
    """A sender of one version at a time.

    Whatever may take long happens off the event loop. `one_by_one`: each engine receives a version by itself,
    independently of the others; otherwise all receive it together, or none does."""

    one_by_one: bool

    async def init(self, engines: Mapping[str, Join]) -> None:
        """Connect all engines there are, before the first version and again when engines come or go.

        `engines[name](invitation)` has that engine's receiver `init`. TransportError if one can't be reached."""

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> Any:
        """Begin a version, of buckets of `sizes` bytes. TransportError if it can't be sent."""

    async def update(self, bucket: Bucket, reference: Any | None) -> Any:
        """Carry the next bucket, or begin to where receivers must take part.

        `reference` is that of a bucket which lies in the run's store already. TransportError if it can't be sent."""

    async def finish(self, delivered: bool) -> None:
        """End the version, whatever became of it; its buckets are not read after that.

        `delivered`: all engines have it; otherwise what else goes wrong follows from the failure that ended it.
        TransportError if it could not be sent."""


class WeightReceiver(Protocol):
    async def init(self, invitation: Any) -> None:
        """Join the sender that wrote `invitation`."""

    async def start(self, manifest: WeightManifest, start: Any) -> None:
        """Prepare for a version; `start` is what the sender's own returned. TransportError if it can't be received."""

    async def update(self, bucket: Any) -> None:
        """Take in the next bucket, of which the sender's `update` returned `bucket`."""

    async def finish(self) -> tuple[WeightManifest, list[Bucket]]:
        """Return the version's buckets, and the manifest that describes their layout.

        The same tensors and digest as the one it was started with. They may be read until the next `start`, and must
        not be written. LookupError, TransportError or WeightError if they can't be received."""


@asynccontextmanager
async def sending(
    sender: WeightSender, manifest: WeightManifest, buckets: Sequence[Bucket], references: Sequence[Any | None] = ()
) -> AsyncIterator[Parcel]:
    """Send a version: inside the context it can be received with the parcel that the context gives.

    Args:
        sender: What carries it.
        manifest: The version's.
        buckets: Its bytes; not read after the context is left, when all engines have received it or the run fails.
        references: Those of buckets that lie in the run's store.

    Raises:
        TransportError: The version could not be sent.
    """
    try:
        parcel = Parcel(await sender.start(manifest, [len(bucket) for bucket in buckets]))
        for bucket, reference in zip_longest(buckets, references):
            parcel.buckets.append(await sender.update(bucket, reference))
        yield parcel
    except BaseException:
        await sender.finish(delivered=False)
        raise
    await sender.finish(delivered=True)


async def receive(
    receiver: WeightReceiver, manifest: WeightManifest, parcel: Parcel
) -> tuple[WeightManifest, list[Bucket]]:
    """Receive a version, as `WeightReceiver.finish` returns it.

    Args:
        receiver: what takes it in, after it has joined the sender.
        manifest: the version's.
        parcel: what `sending` gave for it.

    Raises:
        LookupError, TransportError, WeightError: the version cannot be received."""
    await receiver.start(manifest, parcel.start)
    for bucket in parcel.buckets:
        await receiver.update(bucket)
    return await receiver.finish()
