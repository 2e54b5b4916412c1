"""What every weight transport is. Transports carry buckets and understand nothing of them; digests are compared by
whoever uses them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket

Join = Callable[[Any], Awaitable[None]]


class TransportError(RuntimeError):
    """Weights could not be carried: says which version, and why."""


class WeightSender(Protocol):
    """One version at a time. Whatever may take long happens off the event loop. `one_by_one`: engines receive a version
    each for itself, and need not be met; else all receive it together, or none does."""

    one_by_one: bool

    async def connect(self, engines: Mapping[str, Join]) -> None:
        """Before the first version, and again when engines come or go: all there are. `engines[name](invitation)` has
        that engine's receiver `connect`. TransportError if one can't be reached."""

    def sending(self, manifest: WeightManifest, buckets: list[Bucket]) -> AbstractAsyncContextManager[Any]:
        """Inside the context the version can be received with the parcel it gives. It is left when all engines have
        received the version or the run fails; `buckets` are not read after that. TransportError if the version could
        not be sent."""


class WeightReceiver(Protocol):
    async def connect(self, invitation: Any) -> None:
        """Join the sender that wrote `invitation`."""

    async def receive(self, manifest: WeightManifest, parcel: Any) -> tuple[WeightManifest, list[Bucket]]:
        """The version's buckets, and the manifest that describes their layout: the same tensors and digest as
        `manifest`. They may be read until the next `receive`, and must not be written. LookupError, TransportError or
        WeightError if they can't be had."""
