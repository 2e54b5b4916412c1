"""Tests the weight publisher: order, memory, engines that fail or join, and broadcasts that lose a participant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from omni_async.aio.clock import ManualClock
from omni_async.roles import publisher
from omni_async.roles.publisher import WeightPublisher
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest, WeightReport
from omni_async.weights.digest import Bucket, verify
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import Join, Transfer, TransportError, receive
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender
from tests.roles.actor_world import Desk, failure_of, make_config, make_snapshot
from tests.support.loops import settle


class Receiver:
    """A producer that takes weights, by `transport` if given, while its gate is open. It dies at "join" or a
    version."""

    def __init__(self, name: str, transport: CollectiveReceiver | None = None, dies_at: str | int | None = None):
        self.name, self.dies_at = name, dies_at
        self.gate = asyncio.Event()
        self.gate.set()
        self.memberships: list[Any] = []
        self.received: list[int] = []
        self.transfers: list[Any] = []
        self.fails: Exception | None = None
        self._transport = transport

    async def join_weights(self, membership: Any) -> None:
        self._die_at("join")
        if self._transport:
            await self._transport.init(membership)
        self.memberships.append(membership)

    async def receive_weights(self, manifest: WeightManifest, transfer: Any) -> WeightReport:
        self._die_at(manifest.version)
        if self._transport:
            manifest, buckets = await receive(self._transport, manifest, transfer)
            verify(manifest, buckets)
        self.received.append(manifest.version)
        self.transfers.append(transfer)
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return WeightReport(self.name, manifest.version, manifest.digest)

    def _die_at(self, moment: str | int) -> None:
        if moment == self.dies_at:
            self._transport = self._transport and CollectiveReceiver(self.name, TIMEOUT_S)  # its connections are gone
            raise ConnectionError("the actor died")


class Post:
    """A sender whose transfers are the bytes themselves."""

    one_by_one = True

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.fails: Exception | None = None

    async def init(self, engines: Mapping[str, Join]) -> None:
        for number, join in enumerate(engines.values()):
            await join(f"membership {number}")

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> int:
        if self.fails:
            raise self.fails
        self.log.append(f"send {manifest.version}")
        self.version = manifest.version
        return manifest.version

    async def update(self, bucket: Bucket, reference: Any | None) -> list[int]:
        return bucket.tolist()

    async def finish(self, delivered: bool) -> None:
        if delivered:
            self.log.append(f"sent {self.version}")


class Stage:
    """A publisher at work, with its receivers."""

    def __init__(self, receivers: Sequence[Receiver], sender: Any = None, **changes: Any) -> None:
        self.desk, self.receivers = Desk(), [*receivers]
        self.sender = sender or Post(self.desk.log)
        producers = {r.name: r for r in self.receivers}
        self.publisher = WeightPublisher(make_config(**changes), producers, self.desk, self.sender, ManualClock())
        self.released: list[int] = []
        self.run = asyncio.create_task(self.publisher.run())

    def publish(self, version: int) -> Snapshot:
        snapshot = make_snapshot(version, release=lambda: self.released.append(version))
        self.publisher.publish(snapshot)
        return snapshot

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 (threads make digests)
            await asyncio.sleep(0)

    async def held(self, version: int, *names: str) -> None:
        """Publishes a version and waits until these engines, or all, hold it."""
        self.publish(version)
        await self.arrived(version, *names)

    async def arrived(self, version: int, *names: str) -> None:
        wanted = {*names} or {receiver.name for receiver in self.receivers}
        await self.until(lambda: {name for name, held in self.held_by if held == version} == wanted)

    @property
    def held_by(self) -> list[tuple[str, int]]:
        return [(report.engine, report.version) for report in self.desk.held]

    @property
    def announced(self) -> list[int]:
        return [version for version, _ in self.desk.announced]

    def received(self, engine: int) -> list[int]:
        return self.receivers[engine].received

    async def admit(self, receiver: Receiver | str = "rollout-9") -> None:
        self.receivers.append(Receiver(receiver) if isinstance(receiver, str) else receiver)
        await self.publisher.admit(self.receivers[-1].name, self.receivers[-1])


@asynccontextmanager
async def on_stage(*engines: Receiver, sender: Any = None, fails: bool = False, **changes: Any) -> AsyncIterator[Stage]:
    stage = Stage(engines or [Receiver(f"rollout-{i}") for i in range(2)], sender, **changes)
    yield stage
    assert stage.run.done() == fails
    stage.run.cancel()
    await asyncio.gather(stage.run, return_exceptions=True)


async def test_versions_are_announced_then_delivered():
    async with on_stage() as stage:
        await settle()
        assert [r.memberships for r in stage.receivers] == [["membership 0"], ["membership 1"]]
        snapshot = stage.publish(3)
        await stage.until(lambda: bool(stage.desk.spans))
        assert [r.transfers for r in stage.receivers] == [[Transfer(3, [[3]])]] * 2
        assert {report.digest for report in stage.desk.held} == {snapshot.manifest().digest}
        held = [f"rollout-{i} holds 3" for i in range(2)]
        log = stage.desk.log
        assert (log[:2], sorted(log[2:-1]), log[-1]) == (["announce 3", "send 3"], held, "sent 3")
        assert [span.kind for span in stage.desk.spans] == ["publish"]
        await stage.held(4)
        assert [len(r.memberships) for r in stage.receivers] == [1, 1], "an engine joins once"


async def test_newer_versions_replace_waiting_ones():
    async with on_stage() as stage:
        stage.publisher.withdraw()
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.arrived(0, "rollout-0")  # whatever the slow one does
        stage.publisher.withdraw()
        assert stage.released == [], "it has left"
        for version in (1, 2, 3):
            stage.publish(version)
            await settle()
        assert stage.released == [1, 2]
        stage.receivers[1].gate.set()
        await stage.arrived(3)
        await stage.until(lambda: stage.released == [1, 2, 0])
        assert [stage.received(i) for i in range(2)] == [[0, 3]] * 2
        stage.publish(4)
        stage.publisher.withdraw()
        await settle()
        assert stage.released == [1, 2, 0, 4] and stage.announced == [0, 3]


@pytest.mark.parametrize("error", [EngineError("wrong digest"), TimeoutError()])
async def test_failing_engines_are_lost(error: Exception):
    async with on_stage() as stage:
        stage.receivers[0].fails = error
        await stage.held(1, "rollout-1")
        await stage.until(lambda: bool(stage.desk.lost))
        await stage.held(2, "rollout-1")
        assert stage.desk.lost == [("rollout-0", f"it did not take version 1: {str(error) or 'TimeoutError'}")]
        for name in ("rollout-1", "rollout-7"):
            stage.publisher.remove_engine(name)
        stage.publish(3)
        await stage.until(lambda: "sent 3" in stage.desk.log)
        await stage.admit()
        assert [stage.received(i) for i in range(3)] == [[1], [1, 2], [3]]
        assert len(stage.desk.lost) == 1


@pytest.mark.virtual_time
async def test_late_engines_are_lost():
    async with on_stage(**{"weights.timeout_s": 600}) as stage:
        stage.receivers[1].gate.clear()
        stage.publish(7)
        await asyncio.sleep(600 + publisher._GRACE_S - 1)
        assert (stage.held_by, stage.desk.lost) == ([("rollout-0", 7)], [])
        await asyncio.sleep(2)
        assert stage.desk.lost == [("rollout-1", "it did not take version 7: not within weights.timeout_s = 600")]


async def test_failed_joins():
    async with on_stage() as stage:
        await stage.held(1)
        refusing = Receiver("rollout-9")
        refusing.fails = EngineError("no memory")
        with pytest.raises(EngineError, match="rollout-9"):
            await stage.admit(refusing)
        assert stage.desk.lost == [("rollout-9", "it did not take version 1: no memory")]
        stage.sender.fails = TransportError("no space left")
        assert await failure_of(stage.admit("rollout-10")) is stage.sender.fails
        stage.sender.fails = None
        await stage.admit("rollout-11")
        assert [stage.received(i) for i in (2, 3, 4)] == [[1], [], [1]] and stage.released == []
        stage.publish(2)
        await stage.until(lambda: stage.released == [1])
        assert refusing.received == [1]


async def test_two_sets_of_memory_are_enough():
    """Withdraws, exports and publishes as the trainer does, while receivers are slow and join."""
    async with on_stage() as stage:
        alive: set[int] = set()
        joining: list[asyncio.Task[None]] = []
        for version in range(24):
            stage.publisher.withdraw()
            alive.add(version)
            assert len(alive) <= 2
            stage.publisher.publish(make_snapshot(version, release=lambda version=version: alive.remove(version)))
            if version % 5 == 1:
                stage.receivers[0].gate.clear()
            if version % 5 == 3:
                joining.append(asyncio.create_task(stage.admit(f"joiner-{version}")))
            await settle()
            for _ in range(version % 4):
                await asyncio.sleep(0.001)
            if version % 5 == 4:
                stage.receivers[0].gate.set()
        stage.receivers[0].gate.set()
        await asyncio.gather(*joining)
        await stage.until(lambda: alive == {23})
        assert {stage.received(i)[-1] for i in range(len(stage.receivers))} == {23}


async def test_slow_joiners_need_no_third_set():
    async with on_stage() as stage:
        await stage.held(1)
        joiner = Receiver("rollout-9")
        joiner.gate.clear()
        joining = asyncio.create_task(stage.admit(joiner))
        await stage.until(lambda: bool(joiner.received))
        for version in (2, 3):
            stage.publisher.withdraw()
            assert stage.released == [*range(2, version)], "what waits, and not what is read"
            stage.publish(version)
            await settle()
        joiner.gate.set()
        await joining
        await stage.arrived(3)
        assert joiner.received == [1, 3]


@pytest.mark.parametrize("error", [TransportError("no space left"), OSError("the disk is gone"), KeyError("a bug")])
async def test_failing_sends_and_reports_end_the_run(error: Exception):
    async with on_stage(fails=True) as stage:

        async def fails(_: WeightReport) -> None:
            raise error

        if isinstance(error, KeyError):
            stage.desk.engine_holds = fails  # not taken for a version that arrived
        else:
            stage.sender.fails = error
        stage.publish(1)
        assert await failure_of(stage.run) is error


TIMEOUT_S = 60.0  # nothing waits for it: a death closes connections


def participant(name: str, dies_at: str | int | None = None) -> Receiver:
    return Receiver(name, CollectiveReceiver(name, TIMEOUT_S), dies_at)


def by_broadcast(*participants: Receiver) -> AbstractAsyncContextManager[Stage]:
    sender = CollectiveSender("127.0.0.1", "cpu", TIMEOUT_S)
    return on_stage(*participants, sender=sender, **{"weights.timeout_s": TIMEOUT_S})


@pytest.mark.parametrize("dies_at", ["join", 1])
@pytest.mark.parametrize(("position", "others"), [(0, 1), (0, 2), (1, 1), (1, 2)])
async def test_the_rest_connect_again(position: int, others: int, dies_at: Any):
    rest, dead = [participant(f"rollout-{i}") for i in range(others)], participant("dead", dies_at)
    names = [one.name for one in rest]
    async with by_broadcast(*rest[:position], dead, *rest[position:]) as stage:
        await stage.held(0, *names, *(["dead"] if dies_at == 1 else []))
        await stage.held(1, *names)
        await stage.held(2, *names)
    missed = "take version 1" if dies_at == 1 else "join the weight transport"
    assert stage.desk.lost == [("dead", f"it did not {missed}: the actor died")]
    assert [one.received[-1] for one in rest] == [2] * others


async def test_joins_and_removals_form_the_group_again():
    async with by_broadcast(participant("dead", dies_at=1)) as stage:
        await stage.held(0)
        stage.publish(1)
        await stage.until(lambda: bool(stage.desk.lost))
        stage.publish(2)
        await stage.admit(participant("rollout-1"))
        await stage.arrived(2, "rollout-1")
        await stage.admit(participant("rollout-2"))
        await stage.arrived(2, "rollout-1", "rollout-2")
        await stage.held(3, "rollout-1", "rollout-2")
        assert [len(one.memberships) for one in stage.receivers] == [1, 2, 1]
        stage.publisher.remove_engine("rollout-2")
        await stage.held(4, "rollout-1")
        assert stage.announced == [0, 1, 2, 3, 4] and len(stage.desk.lost) == 1
        assert (stage.received(1)[-1], stage.received(2)) == (4, [2, 3])
