"""Tests the weight publisher: newest first, announced before delivered, memory kept while it is read; engines that fail
are lost, and others join. Over weights by broadcast one that is gone fails all: the rest connect again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from actor_world import Desk, failure_of, make_config, make_snapshot

from omni_async.actors import publisher
from omni_async.actors.publisher import WeightPublisher
from omni_async.aio.clock import ManualClock
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest, WeightReport
from omni_async.weights.digest import Bucket, verify
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import Join, Parcel, TransportError, receive
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender
from tests.loops import settle


class Receiver:
    """A producer that takes weights when its gate is open."""

    def __init__(self, name: str, desk: Desk) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.received: list[tuple[int, Any]] = []
        self.invitations: list[Any] = []
        self.fails: Exception | None = None
        self.refuses: Exception | None = None
        self._desk = desk

    async def join_weights(self, invitation: Any) -> None:
        if self.refuses:
            raise self.refuses
        self.invitations.append(invitation)

    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport:
        self._desk.log.append(f"{self.name} receives {manifest.version}")
        self.received.append((manifest.version, parcel))
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return WeightReport(self.name, manifest.version, manifest.digest)


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

    def __init__(self, desk: Desk, receivers: list[Any], sender: Any, changes: dict[str, Any]) -> None:
        self.desk, self.receivers, self.post = desk, receivers, sender
        producers = {r.name: r for r in self.receivers}
        self.publisher = WeightPublisher(make_config(**changes), producers, self.desk, sender, ManualClock())
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
        await self.until(lambda: {report.engine for report in self.desk.held if report.version == version} == wanted)

    def received(self, engine: int) -> list[int]:
        return [version for version, _ in self.receivers[engine].received]

    def joiner(self, name: str = "rollout-9") -> Receiver:
        self.receivers.append(Receiver(name, self.desk))
        return self.receivers[-1]

    async def admit(self, receiver: Any) -> None:
        await self.publisher.admit(receiver.name, receiver)

    @property
    def announced(self) -> list[int]:
        return [version for version, _ in self.desk.announced]


@asynccontextmanager
async def on_stage(engines: int = 2, **changes: Any) -> AsyncIterator[Stage]:
    desk = Desk()
    stage = Stage(desk, [Receiver(f"rollout-{i}", desk) for i in range(engines)], Post(desk.log), changes)
    yield stage
    stage.run.cancel()
    await asyncio.gather(stage.run, return_exceptions=True)


async def test_a_version_is_announced_then_delivered_to_every_engine_and_their_reports_reach_the_coordinator():
    async with on_stage() as stage:
        snapshot = stage.publish(3)
        await stage.until(lambda: bool(stage.desk.spans))
        assert [r.received for r in stage.receivers] == [[(3, Parcel(3, [[3]]))]] * 2
        assert {report.digest for report in stage.desk.held} == {snapshot.manifest().digest}
    desk = stage.desk
    assert desk.log[:2] == ["announce 3", "send 3"]
    assert {"rollout-0 receives 3", "rollout-1 receives 3"} < set(desk.log[2:-1])
    assert desk.log[-1] == "sent 3"
    assert sorted(report.engine for report in desk.held) == ["rollout-0", "rollout-1"]
    assert [span.kind for span in desk.spans] == ["publish"]


async def test_every_engine_joins_once_before_the_first_version():
    async with on_stage() as stage:
        await settle()
        assert [r.invitations for r in stage.receivers] == [["invitation 0"], ["invitation 1"]]
        await stage.held(1)
        await stage.held(2)
        assert [len(r.invitations) for r in stage.receivers] == [1, 1]


async def test_the_newest_version_replaces_a_waiting_one_and_gives_its_memory_back():
    async with on_stage() as stage:
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.until(lambda: bool(stage.receivers[1].received))
        for version in (1, 2, 3):
            stage.publish(version)
            await settle()
        assert stage.released == [1, 2]
        stage.receivers[1].gate.set()
        await stage.arrived(3)
        assert [[version for version, _ in r.received] for r in stage.receivers] == [[0, 3]] * 2
    assert stage.announced == [0, 3]


async def test_a_version_that_has_left_cannot_be_withdrawn_and_one_that_waits_can():
    async with on_stage() as stage:
        stage.publisher.withdraw()
        stage.receivers[0].gate.clear()
        stage.publish(0)
        await stage.until(lambda: bool(stage.receivers[0].received))
        stage.publisher.withdraw()
        assert stage.released == []
        stage.publish(1)
        stage.publisher.withdraw()
        assert stage.released == [1]
        stage.receivers[0].gate.set()
        await stage.arrived(0)
        await settle()
    assert stage.announced == [0]


async def test_memory_is_given_back_only_when_the_last_engine_has_a_newer_version():
    async with on_stage() as stage:
        await stage.held(0)
        stage.receivers[1].gate.clear()
        stage.publish(1)
        await stage.until(lambda: len(stage.desk.held) == 3)
        await settle()
        assert (stage.desk.held[-1].engine, stage.released) == ("rollout-0", []), "the slow one holds back neither"
        stage.receivers[1].gate.set()
        await stage.until(lambda: stage.released == [0])


@pytest.mark.parametrize("error", [EngineError("wrong digest"), TimeoutError("the child's socket"), TimeoutError()])
async def test_an_engine_that_fails_is_lost_with_its_reason_and_the_others_hold_the_version(error: Exception):
    async with on_stage() as stage:
        stage.receivers[0].fails = error
        stage.publish(1)
        await stage.until(lambda: bool(stage.desk.lost) and bool(stage.desk.held))
        assert stage.desk.lost == [("rollout-0", f"it did not take version 1: {str(error) or 'TimeoutError'}")]
        stage.publish(2)
        await stage.until(lambda: len(stage.desk.held) == 2)
        assert (stage.received(0), stage.received(1)) == ([1], [1, 2]), "nothing more is sent to it"
    desk = stage.desk
    assert [(report.engine, report.version) for report in desk.held] == [("rollout-1", 1), ("rollout-1", 2)]
    assert len(desk.lost) == 1


async def test_an_engine_that_answers_late_is_lost_with_the_setting_it_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher, "_GRACE_S", 0.0)
    async with on_stage(**{"weights.timeout_s": 0.05}) as stage:
        stage.receivers[1].gate.clear()
        stage.publish(7)
        await stage.until(lambda: bool(stage.desk.lost))
        assert stage.desk.lost == [("rollout-1", "it did not take version 7: not within weights.timeout_s = 0.05")]
        assert [report.engine for report in stage.desk.held] == ["rollout-0"]


async def test_an_engine_that_cannot_be_met_is_lost_and_the_others_meet_again():
    async with on_stage() as stage:
        stage.receivers[0].refuses = ConnectionError("the actor died")
        stage.publish(0)
        await stage.until(lambda: bool(stage.desk.held))
        assert stage.desk.lost == [("rollout-0", "it did not join the weight transport: the actor died")]
        assert stage.received(0) == []


async def test_versions_go_on_when_every_engine_is_lost():
    async with on_stage(engines=1) as stage:
        stage.receivers[0].fails = ConnectionError("the actor died")
        for version in (1, 2, 3):
            stage.publish(version)
            await stage.until(lambda sent=f"sent {version}": sent in stage.desk.log)
        newcomer = stage.joiner()
        await stage.admit(newcomer)
        assert stage.received(1) == [3]


async def test_an_engine_that_is_dismissed_gets_nothing_more():
    async with on_stage() as stage:
        stage.publisher.remove_engine("rollout-0")
        stage.publisher.remove_engine("rollout-7")
        stage.publish(1)
        await stage.until(lambda: bool(stage.desk.held))
        assert stage.received(0) == [] and stage.desk.lost == []


# ---- engines that join -----------------------------------------------------------------------------------------------


async def test_an_engine_that_joins_gets_the_newest_version_and_all_that_follow():
    async with on_stage() as stage:
        for version in (1, 2):
            await stage.held(version)
        await stage.admit(stage.joiner())
        assert stage.received(2) == [2]
        assert [(report.engine, report.version) for report in stage.desk.held[4:]] == [("rollout-9", 2)]
        await stage.held(3)
        assert stage.received(2) == [2, 3]
        assert stage.received(0) == [1, 2, 3], "nobody else is sent it again"
    assert stage.announced == [1, 2, 3]


async def test_an_engine_that_joins_while_a_version_is_on_its_way_gets_that_one():
    async with on_stage() as stage:
        await stage.held(1)
        stage.receivers[0].gate.clear()
        stage.publish(2)
        await stage.until(lambda: stage.received(0) == [1, 2])
        joining = asyncio.create_task(stage.admit(stage.joiner()))
        await settle()
        assert stage.received(2) == [] and not joining.done()
        stage.receivers[0].gate.set()
        await joining
        assert stage.received(2) == [2]


async def test_an_engine_that_joins_before_anything_went_out_gets_the_first_version():
    async with on_stage() as stage:
        await stage.admit(stage.joiner())
        assert stage.received(2) == []
        await stage.held(0)
        assert stage.received(2) == [0]


async def test_a_joiner_that_refuses_is_an_error_of_its_own_and_is_lost():
    async with on_stage() as stage:
        await stage.held(1)
        joiner = stage.joiner()
        joiner.fails = EngineError("no memory")
        error = await failure_of(stage.admit(joiner))
        assert type(error) is EngineError and "rollout-9" in str(error)
        assert stage.desk.lost == [("rollout-9", "it did not take version 1: no memory")]
        stage.publish(2)
        await stage.until(lambda: len(stage.desk.held) == 4)
        assert stage.received(2) == [1]


async def test_a_version_that_cannot_be_sent_to_a_joiner_is_kept_for_the_next():
    async with on_stage() as stage:
        await stage.held(1)
        stage.post.fails = TransportError("no space left")
        assert await failure_of(stage.admit(stage.joiner())) is stage.post.fails
        stage.post.fails = None
        await stage.admit(stage.joiner("rollout-10"))
        assert stage.received(3) == [1]
        assert stage.released == []
        stage.publish(2)
        await stage.until(lambda: stage.released == [1])


# ---- memory ----------------------------------------------------------------------------------------------------------


async def test_two_sets_of_memory_are_enough_whoever_is_slow_or_joins():
    """Withdraws, exports into memory that is free, and hands it over, as the trainer does, at every state of the
    others."""
    async with on_stage() as stage:
        alive: set[int] = set()
        largest = 0

        def export(version: int) -> None:
            nonlocal largest
            stage.publisher.withdraw()
            alive.add(version)
            largest = max(largest, len(alive))
            stage.publisher.publish(make_snapshot(version, release=lambda: alive.remove(version)))

        async def turns(version: int) -> None:
            await settle()
            for _ in range(version % 4):
                await asyncio.sleep(0.001)

        joining: list[asyncio.Task[None]] = []
        for version in range(24):
            export(version)
            await turns(version)
            if version % 5 == 1:
                stage.receivers[0].gate.clear()
            if version % 5 == 3:
                joining.append(asyncio.create_task(stage.admit(stage.joiner(f"joiner-{version}"))))
            if version % 5 == 4:
                await turns(3)
                stage.receivers[0].gate.set()
        stage.receivers[0].gate.set()
        await asyncio.gather(*joining)
        await stage.until(lambda: alive == {23})
        assert largest == 2
        assert {stage.received(i)[-1] for i in range(len(stage.receivers))} == {23}


async def test_a_joiner_that_is_slow_keeps_its_version_and_the_trainer_still_needs_no_third_set():
    async with on_stage() as stage:
        await stage.held(1)
        joiner = stage.joiner()
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
        assert stage.received(2) == [1, 3]


async def test_what_the_coordinator_raises_is_not_taken_for_a_version_that_arrived():
    error = KeyError("a bug")
    async with on_stage() as stage:

        async def fails(_: WeightReport) -> None:
            raise error

        stage.desk.engine_holds = fails  # type: ignore[method-assign]
        stage.publish(1)
        assert await failure_of(stage.run) is error


# ---- a sender that cannot --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TransportError("no space left"), OSError("the disk is gone")])
async def test_a_version_that_cannot_be_sent_ends_the_run_with_the_reason(error: Exception):
    async with on_stage() as stage:
        stage.post.fails = error
        stage.publish(1)
        assert await failure_of(stage.run) is error
        assert not stage.receivers[0].received


# ---- by broadcast ----------------------------------------------------------------------------------------------------

# Nothing here waits for it: whoever dies closes its connections, and that ends the others' waits. A machine that stands
# still for a while must not make the living look dead.
TIMEOUT_S = 60.0


class Participant:
    """A producer with a real receiver. `dies_at` is the moment of its death: "join", or a version it is sent."""

    def __init__(self, name: str, dies_at: str | int | None = None) -> None:
        self.name = name
        self.dies_at = dies_at
        self.joined = 0
        self.received: list[int] = []
        self._receiver = CollectiveReceiver(name, TIMEOUT_S)

    async def join_weights(self, invitation: Any) -> None:
        self._die_at("join")
        await self._receiver.init(invitation)
        self.joined += 1

    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport:
        self._die_at(manifest.version)
        manifest, buckets = await receive(self._receiver, manifest, parcel)
        verify(manifest, buckets)
        self.received.append(manifest.version)
        return WeightReport(self.name, manifest.version, manifest.digest)

    def _die_at(self, moment: str | int) -> None:
        if moment == self.dies_at:
            # Its process is gone, and with it the connections.
            self._receiver = CollectiveReceiver(self.name, TIMEOUT_S)
            raise ConnectionError("the actor died")


@asynccontextmanager
async def by_broadcast(*participants: Participant) -> AsyncIterator[Stage]:
    sender = CollectiveSender("127.0.0.1", "cpu", TIMEOUT_S)
    stage = Stage(Desk(), [*participants], sender, {"weights.timeout_s": TIMEOUT_S})
    yield stage
    assert not stage.run.done()
    stage.run.cancel()
    await asyncio.gather(stage.run, return_exceptions=True)


@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("position", [0, 1])
async def test_when_one_dies_the_rest_connect_again_and_get_the_version(position: int, others: int) -> None:
    rest = [Participant(f"rollout-{i}") for i in range(others)]
    dead = Participant("dead", dies_at=1)
    names = [one.name for one in rest]
    async with by_broadcast(*rest[:position], dead, *rest[position:]) as stage:
        await stage.held(0, "dead", *names)
        await stage.held(1, *names)
        await stage.held(2, *names)
    assert stage.desk.lost == [("dead", "it did not take version 1: the actor died")]
    assert dead.received == [0]
    assert [one.received[-1] for one in rest] == [2] * others


async def test_one_that_dies_before_it_has_joined_is_lost_and_the_rest_form_the_group() -> None:
    rest = Participant("rollout-0")
    async with by_broadcast(Participant("dead", dies_at="join"), rest) as stage:
        await stage.held(0, "rollout-0")
    assert stage.desk.lost == [("dead", "it did not join the weight transport: the actor died")]
    assert rest.received == [0]


async def test_one_that_joins_forms_the_group_anew_with_all_the_others() -> None:
    first, joiner = Participant("rollout-0"), Participant("rollout-1")
    async with by_broadcast(first) as stage:
        await stage.held(0, "rollout-0")
        await stage.admit(joiner)
        await stage.arrived(0, "rollout-0", "rollout-1")
        await stage.held(1, "rollout-0", "rollout-1")
    assert stage.desk.lost == []
    assert (first.joined, joiner.joined) == (2, 1)
    assert joiner.received == [0, 1]


async def test_when_all_have_died_the_next_that_joins_gets_the_newest_version() -> None:
    joiner = Participant("rollout-1")
    async with by_broadcast(Participant("dead", dies_at=1)) as stage:
        await stage.held(0, "dead")
        stage.publish(1)
        await stage.until(lambda: bool(stage.desk.lost))
        stage.publish(2)
        await stage.admit(joiner)
        await stage.arrived(2, "rollout-1")
    assert stage.announced == [0, 1, 2]


async def test_one_that_is_dismissed_is_not_waited_for_by_the_next_version() -> None:
    rest, gone = Participant("rollout-0"), Participant("gone")
    async with by_broadcast(rest, gone) as stage:
        await stage.held(0, "rollout-0", "gone")
        stage.publisher.remove_engine("gone")
        await stage.held(1, "rollout-0")
    assert stage.desk.lost == []
    assert gone.received == [0]
