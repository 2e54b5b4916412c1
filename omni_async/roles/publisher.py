"""Sends each version that the trainer copied out to every engine, while generation and training continue.

Lives in the trainer's process, next to rank 0, on its event loop; digests and transports run in other threads than the
training. Waits for the trainer's `publish`, which unblocks it. One version is sent at a time. A version that is
published meanwhile waits, and the next one supersedes it: engines only ever need the newest. The last version sent is
kept for engines that join later, until the trainer needs its memory. An engine that does not take a version is reported
as lost, and the others continue without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omni_async.aio.clock import Clock
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import Event, is_cancelled
from omni_async.config import Config
from omni_async.roles.api import CoordinatorForPublisher, ProducerApi, Tracer
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import TransportError, WeightSender, sending

# Transports have their own, more specific time-out; this one is for engines that do not answer even then.
_GRACE_S = 10.0
# Number of repeated sends of a version after a disturbance among engines that receive it together.
_TRIES = 3


@dataclass(eq=False)
class WeightPublisher:
    """The publisher, which lives in the trainer's process; `withdraw` and `publish` do not wait."""

    config: Config
    producers: dict[str, ProducerApi]
    coordinator: CoordinatorForPublisher
    sender: WeightSender
    clock: Clock

    def __post_init__(self) -> None:
        self.producers = dict(self.producers)  # a private copy: engines come and leave
        self._tracer = Tracer("publisher", self.coordinator, self.clock)
        self._waiting: Snapshot | None = None
        self._carried: Snapshot | None = None  # the version being sent
        self._newest: tuple[WeightManifest, Snapshot] | None = None  # the newest version sent
        self._connected: set[str] = set()  # engines that can receive together
        self._sending = asyncio.Lock()
        self._event = Event()

    def withdraw(self) -> None:
        """Release memory before an export.

        Releases a published version that has not been sent yet. Otherwise, while a version is being sent, releases the
        previous one, which it replaces."""
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None
        elif self._carried is not None:
            self._release_newest()

    def publish(self, snapshot: Snapshot) -> None:
        """Take over a version; everything after that happens alongside the training."""
        self.withdraw()
        self._waiting = snapshot
        self._event.notify()

    async def run(self) -> None:
        """Publish until cancelled. Raises TransportError if a version cannot be sent at all."""
        async with self._sending:
            await self._connect()
        while True:
            while self._waiting is None:
                await self._event.wait()
            async with self._sending:
                await self._publish_waiting()
            await self._tracer.flush()

    async def _publish_waiting(self) -> None:
        self._carried, self._waiting = self._waiting, None
        if self._carried is None:
            return  # withdrawn while an engine joined
        with self._tracer.span(
            "publish", version=self._carried.version, megabytes=round(self._carried.nbytes / 1e6, 3)
        ):
            self._carried = await self._carried.whole()
            manifest = await in_daemon_thread(self._carried.manifest)
            await self.coordinator.announce(manifest.version, manifest.digest)
            await self._send(manifest, self._carried, [*self.producers])
        self._release_newest()
        self._newest, self._carried = (manifest, self._carried), None

    def _release_newest(self) -> None:
        if self._newest is not None:
            self._newest[1].release()
            self._newest = None

    # ---- membership --------------------------------------------------------------------------------------------------

    async def admit(self, name: str, producer: ProducerApi) -> None:
        """Add an engine: it gets the newest version, and all later ones. Raises EngineError if it does not take it."""
        async with self._sending:
            self.producers[name] = producer
            if not self.sender.one_by_one:
                await self._connect()
            if self._newest is not None and name in self.producers:
                # Nothing is exported into this version's memory meanwhile.
                manifest, snapshot = self._newest
                self._newest, self._carried = None, snapshot
                try:
                    await self._send(manifest, snapshot, [name] if self.sender.one_by_one else [*self.producers])
                finally:
                    self._newest, self._carried = (manifest, snapshot), None
        if name not in self.producers:
            raise EngineError(f"{name} could not join: the reason was reported to the coordinator")

    def remove_engine(self, name: str) -> None:
        """Stop sending to an engine that is gone."""
        self.producers.pop(name, None)

    async def _lost(self, name: str, version: int | None, error: BaseException) -> None:
        if name in self.producers:
            self.remove_engine(name)
            step = "join the weight transport" if version is None else f"take version {version}"
            await self.coordinator.engine_lost(name, f"it did not {step}: {str(error) or type(error).__name__}")

    # ---- sending -----------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Connect every engine with the sender. An engine that fails to join is lost, and the rest connect again."""
        while self.producers:
            failed: dict[str, BaseException] = {}
            joining = {name: partial(self._join, name, producer, failed) for name, producer in self.producers.items()}
            try:
                await self.sender.init(joining)
                self._connected = {*joining}
                return
            except TransportError:
                if not failed:
                    raise
            # If another engine failed, an engine that merely waited in vain for the others is not at fault.
            for name in [name for name, error in failed.items() if not isinstance(error, TransportError)] or [*failed]:
                await self._lost(name, None, failed[name])

    async def _join(self, name: str, producer: ProducerApi, failed: dict[str, BaseException], membership: Any) -> None:
        try:
            async with asyncio.timeout(self.config.weights.timeout_s + _GRACE_S):
                await producer.join_weights(membership)
        except Exception as error:
            failed[name] = error
            raise TransportError(f"{name}: {error}") from error

    async def _send(self, manifest: WeightManifest, snapshot: Snapshot, names: Iterable[str]) -> None:
        """Send until every remaining engine of `names` holds the version.

        If all receive together and one fails, all fail: then the remaining engines connect and try again."""
        left = [name for name in names if name in self.producers]
        for last in (*(False for _ in range(_TRIES)), True):
            if not self.sender.one_by_one and self._connected != self.producers.keys():
                await self._connect()  # otherwise the send would wait for an engine that is gone
                left = [*self.producers]
            if not (left or self.sender.one_by_one):
                return  # there is no group to send to
            failed = await self._attempt(manifest, snapshot, left)
            together = not (last or self.sender.one_by_one)
            victims = [name for name, error in failed.items() if together and isinstance(error, TransportError)]
            for name, error in failed.items():
                if name not in victims:
                    await self._lost(name, manifest.version, error)
            if not victims:
                return
            await self._connect()
            left = [*self.producers]

    async def _attempt(
        self, manifest: WeightManifest, snapshot: Snapshot, names: Iterable[str]
    ) -> dict[str, BaseException]:
        failed: dict[str, BaseException] = {}
        try:
            async with sending(self.sender, manifest, snapshot.buckets, snapshot.references) as transfer:
                delivering = {
                    asyncio.create_task(self._deliver(name, manifest, transfer, failed)): name for name in names
                }
                await self._delivered(delivering, failed)
        except TransportError:
            if not failed:
                raise
        return failed

    async def _delivered(self, delivering: dict[asyncio.Task[None], str], failed: dict[str, BaseException]) -> None:
        """Wait until every engine has the version or has failed.

        If engines receive together and one fails, the rest would wait for their time-outs. Their deliveries are
        cancelled instead, and TransportError is raised, so that they connect again."""
        left = set(delivering)
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an engine's failure is in `failed`; the coordinator's exceptions propagate
                if failed and not self.sender.one_by_one:
                    broken = TransportError("others that receive with it failed")
                    failed.update({delivering[task]: broken for task in left})
                    raise broken
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*delivering, return_exceptions=True)

    async def _deliver(
        self, name: str, manifest: WeightManifest, transfer: object, failed: dict[str, BaseException]
    ) -> None:
        try:
            async with asyncio.timeout(self.config.weights.timeout_s + _GRACE_S) as deadline:
                report = await self.producers[name].receive_weights(manifest, transfer)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failed[name] = TransportError("it broke off what it was receiving")
            return
        except Exception as error:  # noqa: BLE001 (an engine's death raises many types)
            late = isinstance(error, TimeoutError) and deadline.expired()
            failed[name] = (
                EngineError(f"not within weights.timeout_s = {self.config.weights.timeout_s:g}") if late else error
            )
            return
        await self.coordinator.engine_holds(report)
