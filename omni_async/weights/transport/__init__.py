"""Builds the transport that carries a published version to the engines.

`build_sender` builds the `WeightSender` next to trainer rank 0, `build_receiver` a `WeightReceiver` next to every
engine. A version that cannot be carried is a `TransportError`. `weights.transport` chooses the transport; a transport's
module, with its imports, is loaded only if it is chosen.
"""

from __future__ import annotations

from pathlib import Path

from omni_async.config import Config
from omni_async.store import ObjectStore
from omni_async.weights.transport.base import WeightReceiver, WeightSender


def build_sender(config: Config, store: ObjectStore, folder: Path, host: str = "127.0.0.1") -> WeightSender:
    """Build the sender.

    Args:
        config: the recipe.
        store: the run's object store.
        folder: where transport `disk` writes weights.
        host: this machine's address for other machines, for transport `collective`."""
    match config.weights.transport:
        case "object_store":
            from omni_async.weights.transport.object_store import ObjectStoreSender

            return ObjectStoreSender(store)
        case "disk":
            from omni_async.weights.transport.disk import DiskSender

            return DiskSender(folder)
        case "collective":
            from omni_async.weights.transport.collective import CollectiveSender, carrier_of

            return CollectiveSender(host, carrier_of(config), config.weights.timeout_s)


def build_receiver(config: Config, name: str, store: ObjectStore) -> WeightReceiver:
    """Build the receiver next to an engine.

    Args:
        config: the recipe.
        name: the engine's.
        store: the run's object store."""
    match config.weights.transport:
        case "object_store":
            from omni_async.weights.transport.object_store import ObjectStoreReceiver

            return ObjectStoreReceiver(store)
        case "disk":
            from omni_async.weights.transport.disk import DiskReceiver

            return DiskReceiver()
        case "collective":
            from omni_async.weights.transport.collective import CollectiveReceiver

            return CollectiveReceiver(name, config.weights.timeout_s)
