"""Tests the weight publisher: newest first, announced before delivered, memory kept while it is read; engines that fail
are lost, and others join. Over weights by broadcast one that is gone fails all: the rest connect again."""

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
from omni_async.weights.transport.base import Join, Parcel, TransportError, receive
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender
from tests.roles.actor_world import Desk, failure_of, make_config, make_snapshot
from tests.support.loops import settle


class Receiver:
    """A producer that takes weights when its gate is open: a parcel as it is, or with a transport's receiver what that
    brings. `dies_at` is the moment of its death: "join", or a version it is sent."""

    def __init__(self, name: str, transport: CollectiveReceiver | None = None, dies_at: str | int | None = None):
        self.name, self.dies_at = name, dies_at
        self.gate = asyncio.Event()
        self.gate.set()
        self.invitations: list[Any] = []
        self.received: list[int] = []
        self.parcels: list[Any] = []
        self.fails: Exception | None = None
        self._transport = transport

    async def join_weights(self, invitation: Any) -> None:
        self._die_at("join")
        if self._transport:
            await self._transport.init(invitation)
        self.invitations.append(invitation)

    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport:
        self._die_at(manifest.version)
        if self._transport:
            manifest, buckets = await receive(self._transport, manifest, parcel)
            verify(manifest, buckets)
        self.received.append(manifest.version)
        self.parcels.append(parcel)
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return WeightReport(self.name, manifest.version, manifest.digest)

    def _die_at(self, moment: str | int) -> None:
        if moment == self.dies_at:
            self._transport = self._transport and CollectiveReceiver(self.name, TIMEOUT_S)  # its connections are gone
            raise ConnectionError("the actor died")


class Post:
    """A sender whose parcels are the bytes themselves; it signals when a version leaves and when it has arrived."""

    one_by_one = True

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.fails: Exception | None = None

    async def init(self, engines: Mapping[str, Join]) -> None:
        for number, join in enumerate(engines.values()):
            await join(f"invitation {number}")

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
        """Digests are made in a thread, so counting turns of the loop is not enough."""
        while not condition():  # noqa: ASYNC110 (conditions of many kinds, none of which rings)
            await asyncio.sleep(0)

    async def held(self, version: int, *names: str) -> None:
        """Returns when the engines of these names, or all, hold a version that is published now."""
        self.publish(version)
        await self.arrived(version, *names)

    async def arrived(self, version: int, *names: str) -> None:
        wanted = {*names} or {receiver.name for receiver in self.receivers}
        await self.until(lambda: {name for name, held in self.held_by if held == version} == wanted)

    @property
    def held_by(self) -> list[tuple[str, int]]:
        return [(report.engine, report.version) for report in self.desk.held]

    def received(self, engine: int) -> list[int]:
        return self.receivers[engine].received

    async def admit(self, receiver: Receiver | str = "rollout-9") -> None:
        self.receivers.append(Receiver(receiver) if isinstance(receiver, str) else receiver)
        await self.publisher.admit(self.receivers[-1].name, self.receivers[-1])

    @property
    def announced(self) -> list[int]:
        return [version for version, _ in self.desk.announced]


@asynccontextmanager
async def on_stage(*engines: Receiver, sender: Any = None, fails: bool = False, **changes: Any) -> AsyncIterator[Stage]:
    stage = Stage(engines or [Receiver(f"rollout-{i}") for i in range(2)], sender, **changes)
    yield stage
    assert stage.run.done() == fails
    stage.run.cancel()
    await asyncio.gather(stage.run, return_exceptions=True)


async def test_a_version_is_announced_then_delivered_to_every_engine_and_their_reports_reach_the_coordinator():
    async with on_stage() as stage:
        await settle()
        assert [r.invitations for r in stage.receivers] == [["invitation 0"], ["invitation 1"]]
        snapshot = stage.publish(3)
        await stage.until(lambda: bool(stage.desk.spans))
        assert [r.parcels for r in stage.receivers] == [[Parcel(3, [[3]])]] * 2
        assert {report.digest for report in stage.desk.held} == {snapshot.manifest().digest}
        held = [f"rollout-{i} holds 3" for i in range(2)]
        log = stage.desk.log
        assert (log[:2], sorted(log[2:-1]), log[-1]) == (["announce 3", "send 3"], held, "sent 3")
        assert [span.kind for span in stage.desk.spans] == ["publish"]
        await stage.held(4)
        assert [len(r.invitations) for r in stage.receivers] == [1, 1], "an engine joins once"


async def test_the_newest_version_replaces_a_waiting_one_which_can_be_withdrawn_and_no_other():
    async with on_stage() as stage:
        stage.publisher.withdraw()
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.until(lambda: bool(stage.receivers[1].received))
        stage.publisher.withdraw()
        assert stage.released == [], "it has left"
        for version in (1, 2, 3):
            stage.publish(version)
            await settle()
        assert stage.released == [1, 2]
        stage.receivers[1].gate.set()
        await stage.arrived(3)
        assert [stage.received(i) for i in range(2)] == [[0, 3]] * 2
        stage.publish(4)
        stage.publisher.withdraw()
        await settle()
        assert stage.released[-1] == 4 and stage.announced == [0, 3]


async def test_memory_is_given_back_only_when_the_last_engine_has_a_newer_version():
    async with on_stage() as stage:
        await stage.held(0)
        stage.receivers[1].gate.clear()
        stage.publish(1)
        await stage.until(lambda: len(stage.desk.held) == 3)
        await settle()
        assert (stage.held_by[-1], stage.released) == (("rollout-0", 1), []), "the slow one holds back neither"
        stage.receivers[1].gate.set()
        await stage.until(lambda: stage.released == [0])


@pytest.mark.parametrize("error", [EngineError("wrong digest"), TimeoutError("the child's socket"), TimeoutError()])
async def test_an_engine_that_fails_is_lost_with_its_reason_and_the_others_hold_the_version(error: Exception):
    async with on_stage() as stage:
        stage.receivers[0].fails = error
        await stage.held(1, "rollout-1")
        await stage.until(lambda: bool(stage.desk.lost))
        await stage.held(2, "rollout-1")
        assert (stage.received(0), stage.received(1)) == ([1], [1, 2]), "nothing more is sent to it"
        assert stage.desk.lost == [("rollout-0", f"it did not take version 1: {str(error) or 'TimeoutError'}")]


@pytest.mark.virtual_time
async def test_an_engine_that_answers_late_is_lost_with_the_setting_it_missed():
    async with on_stage(**{"weights.timeout_s": 600}) as stage:
        stage.receivers[1].gate.clear()
        stage.publish(7)
        await asyncio.sleep(600 + publisher._GRACE_S - 1)
        assert (stage.held_by, stage.desk.lost) == ([("rollout-0", 7)], [])
        await asyncio.sleep(2)
        assert stage.desk.lost == [("rollout-1", "it did not take version 7: not within weights.timeout_s = 600")]
        assert stage.held_by == [("rollout-0", 7)]


async def test_versions_go_on_when_every_engine_is_lost_and_one_that_was_dismissed_gets_nothing_more():
    async with on_stage() as stage:
        stage.receivers[0].fails = ConnectionError("the actor died")
        for name in ("rollout-1", "rollout-7"):
            stage.publisher.remove_engine(name)
        for version in (1, 2, 3):
            stage.publish(version)
            await stage.until(lambda sent=f"sent {version}": sent in stage.desk.log)
        assert [name for name, _ in stage.desk.lost] == ["rollout-0"]
        await stage.admit()
        assert [stage.received(i) for i in range(3)] == [[1], [], [3]]


# ---- engines that join -----------------------------------------------------------------------------------------------


async def test_an_engine_that_joins_gets_the_newest_version_or_the_first_and_all_that_follow():
    async with on_stage() as stage:
        await stage.admit("rollout-8")
        await stage.held(0)
        await stage.held(1)
        await stage.admit()
        assert stage.held_by[6:] == [("rollout-9", 1)]
        await stage.held(2)
        assert [stage.received(i) for i in (2, 3)] == [[0, 1, 2], [1, 2]]
        assert stage.received(0) == [0, 1, 2], "nobody else is sent it again"
        assert stage.announced == [0, 1, 2]


async def test_an_engine_that_joins_while_a_version_is_on_its_way_gets_that_one():
    async with on_stage() as stage:
        await stage.held(1)
        stage.receivers[0].gate.clear()
        stage.publish(2)
        await stage.until(lambda: stage.received(0) == [1, 2])
        joining = asyncio.create_task(stage.admit())
        await settle()
        assert stage.received(2) == [] and not joining.done()
        stage.receivers[0].gate.set()
        await joining
        assert stage.received(2) == [2]


async def test_a_joiner_that_refuses_is_an_error_of_its_own_and_one_that_nothing_can_be_sent_to_leaves_the_version():
    async with on_stage() as stage:
        await stage.held(1)
        refusing = Receiver("rollout-9")
        refusing.fails = EngineError("no memory")
        error = await failure_of(stage.admit(refusing))
        assert type(error) is EngineError and "rollout-9" in str(error)
        assert stage.desk.lost == [("rollout-9", "it did not take version 1: no memory")]
        stage.sender.fails = TransportError("no space left")
        assert await failure_of(stage.admit("rollout-10")) is stage.sender.fails
        stage.sender.fails = None
        await stage.admit("rollout-11")
        assert [stage.received(i) for i in (2, 3, 4)] == [[1], [], [1]] and stage.released == []
        stage.publish(2)
        await stage.until(lambda: stage.released == [1])
        assert refusing.received == [1]


async def test_two_sets_of_memory_are_enough_whoever_is_slow_or_joins():
    """Withdraws, exports into memory that is free, and hands it over, as the trainer does, at every state of the
    others."""
    async with on_stage() as stage:
        alive: set[int] = set()
        largest = 0
        joining: list[asyncio.Task[None]] = []
        for version in range(24):
            stage.publisher.withdraw()
            alive.add(version)
            largest = max(largest, len(alive))
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
        assert largest == 2
        assert {stage.received(i)[-1] for i in range(len(stage.receivers))} == {23}


async def test_a_joiner_that_is_slow_keeps_its_version_and_the_trainer_still_needs_no_third_set():
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
async def test_a_version_that_cannot_be_sent_or_told_of_ends_the_run_with_the_reason(error: Exception):
    async with on_stage(fails=True) as stage:

        async def fails(_: WeightReport) -> None:
            raise error

        if isinstance(error, KeyError):
            stage.desk.engine_holds = fails  # not taken for a version that arrived
        else:
            stage.sender.fails = error
        stage.publish(1)
        assert await failure_of(stage.run) is error


# ---- by broadcast ----------------------------------------------------------------------------------------------------

# Nothing here waits for it: whoever dies closes its connections, and that ends the others' waits. A machine that stands
# still for a while must not make the living look dead.
TIMEOUT_S = 60.0


def participant(name: str, dies_at: str | int | None = None) -> Receiver:
    return Receiver(name, CollectiveReceiver(name, TIMEOUT_S), dies_at)


def by_broadcast(*participants: Receiver) -> AbstractAsyncContextManager[Stage]:
    sender = CollectiveSender("127.0.0.1", "cpu", TIMEOUT_S)
    return on_stage(*participants, sender=sender, **{"weights.timeout_s": TIMEOUT_S})


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("position", [0, 1])
async def test_when_one_dies_the_rest_connect_again_and_get_the_version(position: int, others: int) -> None:
    rest, dead = [participant(f"rollout-{i}") for i in range(others)], participant("dead", dies_at=1)
    names = [one.name for one in rest]
    async with by_broadcast(*rest[:position], dead, *rest[position:]) as stage:
        await stage.held(0, "dead", *names)
        await stage.held(1, *names)
        await stage.held(2, *names)
    assert stage.desk.lost == [("dead", "it did not take version 1: the actor died")]
    assert dead.received == [0] and [one.received[-1] for one in rest] == [2] * others


async def test_one_that_dies_before_it_has_joined_is_lost_and_the_rest_form_the_group() -> None:
    async with by_broadcast(participant("dead", dies_at="join"), participant("rollout-0")) as stage:
        await stage.held(0, "rollout-0")
        assert stage.desk.lost == [("dead", "it did not join the weight transport: the actor died")]
        assert stage.received(1) == [0]


async def test_one_that_joins_forms_the_group_anew_with_all_the_others_and_one_dismissed_is_not_waited_for() -> None:
    async with by_broadcast(participant("rollout-0")) as stage:
        await stage.held(0)
        await stage.admit(participant("rollout-1"))
        await stage.arrived(0)
        await stage.held(1)
        assert [len(one.invitations) for one in stage.receivers] == [2, 1] and stage.received(1) == [0, 1]
        stage.publisher.remove_engine("rollout-1")
        await stage.held(2, "rollout-0")
        assert stage.desk.lost == [] and stage.received(1) == [0, 1]


async def test_when_all_have_died_the_next_that_joins_gets_the_newest_version() -> None:
    async with by_broadcast(participant("dead", dies_at=1)) as stage:
        await stage.held(0)
        stage.publish(1)
        await stage.until(lambda: bool(stage.desk.lost))
        stage.publish(2)
        await stage.admit(participant("rollout-1"))
        await stage.arrived(2, "rollout-1")
        assert stage.announced == [0, 1, 2]
