"""Defines the interface of weight transports. Transports carry buckets without interpreting them; senders and receivers
of the weights compare digests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket

Join = Callable[[Any], Awaitable[None]]


class TransportError(RuntimeError):
    """Weights could not be carried: names the version, and the reason."""


class WeightSender(Protocol):
    """A sender of one version at a time. Whatever may take long happens off the event loop. `one_by_one`: each engine
    receives a version by itself, independently of the others; otherwise all receive it together, or none does."""

    one_by_one: bool

    async def connect(self, engines: Mapping[str, Join]) -> None:
        """Connects all engines there are, before the first version and again when engines come or go.
        `engines[name](invitation)` has that engine's receiver `connect`. TransportError if one can't be reached."""

    def sending(self, manifest: WeightManifest, buckets: list[Bucket]) -> AbstractAsyncContextManager[Any]:
        """Sends a version: inside the context it can be received with the parcel that the context gives. The context is
        left when all engines have received the version or the run fails; `buckets` are not read after that.
        TransportError if the version could not be sent."""


class WeightReceiver(Protocol):
    async def connect(self, invitation: Any) -> None:
        """Joins the sender that wrote `invitation`."""

    async def receive(self, manifest: WeightManifest, parcel: Any) -> tuple[WeightManifest, list[Bucket]]:
        """Returns the version's buckets, and the manifest that describes their layout: the same tensors and digest as
        `manifest`. They may be read until the next `receive`, and must not be written. LookupError, TransportError or
        WeightError if they can't be received."""
