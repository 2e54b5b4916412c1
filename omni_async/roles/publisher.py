"""Carries each version that the trainer copied out to every engine, while generation and training go on.

Lives in the trainer's process, beside rank 0, on its event loop; digests and transports work in threads that are not
the one that trains. Waits for the trainer's `publish`; unblocked by it. One version is on its way at a time. One that
is handed over meanwhile waits, and is superseded by the next: engines only ever need the newest. The last that went out
is kept for engines that join later, as long as the trainer does not need its memory. An engine that does not take a
version is reported as lost, and the others go on without it.
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
from omni_async.roles.api import CoordinatorApi, ProducerApi, Tracer
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import TransportError, WeightSender, sending

# Transports have the time-out themselves and say more when it passes; this is for engines that do not answer even then.
_GRACE_S = 10.0
# How often a version is sent again after the engines that receive it together were disturbed.
_TRIES = 3


@dataclass(eq=False)
class WeightPublisher:
    """The publisher, which lives in the trainer's process: `withdraw` and `publish` wait for nothing."""

    config: Config
    producers: dict[str, ProducerApi]
    coordinator: CoordinatorApi
    sender: WeightSender
    clock: Clock

    def __post_init__(self) -> None:
        self.producers = dict(self.producers)  # from here on its own: engines come and go
        self._tracer = Tracer("publisher", self.coordinator, self.clock)
        self._waiting: Snapshot | None = None
        self._carried: Snapshot | None = None  # the version on its way
        self._newest: tuple[WeightManifest, Snapshot] | None = None  # the newest version that went out
        self._connected: set[str] = set()  # engines that can receive together
        self._sending = asyncio.Lock()
        self._event = Event()

    def withdraw(self) -> None:
        """Release memory before an export.

        It is that of a version which was handed over but has not left, or of the last that went out while another is
        on its way to replace it."""
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None
        elif self._carried is not None:
            self._release_newest()

    def publish(self, snapshot: Snapshot) -> None:
        """Take over a version; everything that follows happens beside the training."""
        self.withdraw()
        self._waiting = snapshot
        self._event.notify()

    async def run(self) -> None:
        """Publish until cancelled. TransportError if a version can't be sent at all."""
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

    async def retire(self) -> None:
        """Release the memory of the last version, once that is out: no engine will join any more."""
        async with self._sending:
            self._release_newest()

    def _release_newest(self) -> None:
        if self._newest is not None:
            self._newest[1].release()
            self._newest = None

    # ---- membership --------------------------------------------------------------------------------------------------

    async def admit(self, name: str, producer: ProducerApi) -> None:
        """Add an engine: it gets the newest version, and all that follow. EngineError if it does not take it."""
        async with self._sending:
            self.producers[name] = producer
            if not self.sender.one_by_one:
                await self._connect()
            if self._newest is not None and name in self.producers:
                # Nothing is exported into its memory meanwhile.
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
        """Connect every engine with the sender. An engine that does not come is lost, and the rest connect again."""
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
            # An engine that could be asked and then waited in vain for the others is not to blame, if another one is.
            for name in [name for name, error in failed.items() if not isinstance(error, TransportError)] or [*failed]:
                await self._lost(name, None, failed[name])

    async def _join(self, name: str, producer: ProducerApi, failed: dict[str, BaseException], invitation: Any) -> None:
        try:
            async with asyncio.timeout(self.config.weights.timeout_s + _GRACE_S):
                await producer.join_weights(invitation)
        except Exception as error:
            failed[name] = error
            raise TransportError(f"{name}: {error}") from error

    async def _send(self, manifest: WeightManifest, snapshot: Snapshot, names: Iterable[str]) -> None:
        """Send until every engine of `names` that is still there holds the version.

        Where all receive at once, and one fails, all do: then those that are left connect again, and try again."""
        left = [name for name in names if name in self.producers]
        for last in (*(False for _ in range(_TRIES)), True):
            if not self.sender.one_by_one and self._connected != self.producers.keys():
                await self._connect()  # an engine that is gone would be waited for
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
            async with sending(self.sender, manifest, snapshot.buckets, snapshot.references) as parcel:
                delivering = {
                    asyncio.create_task(self._deliver(name, manifest, parcel, failed)): name for name in names
                }
                await self._delivered(delivering, failed)
        except TransportError:
            if not failed:
                raise
        return failed

    async def _delivered(self, delivering: dict[asyncio.Task[None], str], failed: dict[str, BaseException]) -> None:
        """Wait until all have the version or have failed.

        Where engines receive it together and one fails, the rest would wait for their time-outs: their deliveries are
        cancelled, and TransportError is raised, so that they connect again."""
        left = set(delivering)
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an engine's failure is in `failed`; what the coordinator raises goes on
                if failed and not self.sender.one_by_one:
                    broken = TransportError("others that receive with it failed")
                    failed.update({delivering[task]: broken for task in left})
                    raise broken
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*delivering, return_exceptions=True)

    async def _deliver(
        self, name: str, manifest: WeightManifest, parcel: object, failed: dict[str, BaseException]
    ) -> None:
        try:
            async with asyncio.timeout(self.config.weights.timeout_s + _GRACE_S) as deadline:
                report = await self.producers[name].receive_weights(manifest, parcel)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failed[name] = TransportError("it broke off what it was receiving")
            return
        except Exception as error:  # noqa: BLE001 (an engine's death comes in many kinds)
            late = isinstance(error, TimeoutError) and deadline.expired()
            failed[name] = (
                EngineError(f"not within weights.timeout_s = {self.config.weights.timeout_s:g}") if late else error
            )
            return
        await self.coordinator.engine_holds(report)
