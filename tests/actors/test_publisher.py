"""The weight publisher: newest first, announced before delivered, memory kept while it is read, and an engine that does not answer is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from actor_world import Desk, failure_of, make_config, make_snapshot, play, settle

from omni_async.actors.publisher import WeightPublisher
from omni_async.control.clock import ManualClock
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest, WeightReport
from omni_async.weights.digest import Bucket
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import Join, TransportError


class Receiver:
    """A producer that takes weights when its gate is open."""

    def __init__(self, name: str, desk: Desk) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.received: list[tuple[int, Any]] = []
        self.invitations: list[Any] = []
        self.fails: Exception | None = None
        self._desk = desk

    async def join_weights(self, invitation: Any) -> None:
        self.invitations.append(invitation)

    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport:
        self._desk.log.append(f"{self.name} receives {manifest.version}")
        self.received.append((manifest.version, parcel))
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return WeightReport(self.name, manifest.version, manifest.digest)


class Post:
    """A sender whose parcels are the bytes themselves; it tells when a version leaves and when it has arrived."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.fails: Exception | None = None

    async def connect(self, engines: Mapping[str, Join]) -> None:
        for number, join in enumerate(engines.values()):
            await join(f"invitation {number}")

    @asynccontextmanager
    async def sending(self, manifest: WeightManifest, buckets: list[Bucket]) -> AsyncIterator[list[list[int]]]:
        if self.fails:
            raise self.fails
        self.log.append(f"send {manifest.version}")
        yield [bucket.tolist() for bucket in buckets]
        self.log.append(f"sent {manifest.version}")


class Stage:
    """A publisher at work, with as many receivers."""

    def __init__(self, engines: int, changes: dict[str, Any]) -> None:
        self.desk = Desk()
        self.receivers = [Receiver(f"rollout-{i}", self.desk) for i in range(engines)]
        self.post = Post(self.desk.log)
        producers = {r.name: r for r in self.receivers}
        self.publisher = WeightPublisher(make_config(**changes), producers, self.desk, self.post, ManualClock())
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

    def holds(self, version: int) -> Callable[[], bool]:
        return lambda: [report.version for report in self.desk.held].count(version) == len(self.receivers)


Scene = Callable[[Stage], Awaitable[None]]


def on_stage(scene: Scene, engines: int = 2, **changes: Any) -> Stage:
    kept: list[Stage] = []

    async def main() -> None:
        stage = Stage(engines, changes)
        kept.append(stage)
        await scene(stage)
        stage.run.cancel()
        await asyncio.gather(stage.run, return_exceptions=True)

    play(main())
    return kept[0]


def test_a_version_is_announced_then_delivered_to_every_engine_and_their_reports_reach_the_coordinator():
    async def scene(stage: Stage) -> None:
        snapshot = stage.publish(3)
        await stage.until(lambda: stage.released == [3])
        assert [r.received for r in stage.receivers] == [[(3, [[3]])]] * 2
        assert {report.digest for report in stage.desk.held} == {snapshot.manifest().digest}

    desk = on_stage(scene).desk
    assert desk.log[:2] == ["announce 3", "send 3"]
    assert {"rollout-0 receives 3", "rollout-1 receives 3"} < set(desk.log[2:-1])
    assert desk.log[-1] == "sent 3"
    assert sorted(report.engine for report in desk.held) == ["rollout-0", "rollout-1"]
    assert [span.kind for span in desk.spans] == ["publish"]


def test_every_engine_joins_once_before_the_first_version():
    async def scene(stage: Stage) -> None:
        await settle()
        assert [r.invitations for r in stage.receivers] == [["invitation 0"], ["invitation 1"]]
        for version in (1, 2):
            stage.publish(version)
            await stage.until(stage.holds(version))
        assert [len(r.invitations) for r in stage.receivers] == [1, 1]

    on_stage(scene)


def test_the_newest_version_replaces_a_waiting_one_and_gives_its_memory_back():
    async def scene(stage: Stage) -> None:
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.until(lambda: bool(stage.receivers[1].received))
        for version in (1, 2, 3):
            stage.publish(version)
            await settle()
        assert stage.released == [1, 2]
        stage.receivers[1].gate.set()
        await stage.until(stage.holds(3))
        assert [[version for version, _ in r.received] for r in stage.receivers] == [[0, 3]] * 2

    assert [version for version, _ in on_stage(scene).desk.announced] == [0, 3]


def test_a_version_that_has_left_cannot_be_withdrawn_and_one_that_waits_can():
    async def scene(stage: Stage) -> None:
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
        await stage.until(lambda: stage.released == [1, 0])
        await settle()

    assert [version for version, _ in on_stage(scene).desk.announced] == [0]


def test_memory_is_given_back_only_when_the_last_engine_has_the_version():
    async def scene(stage: Stage) -> None:
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.until(lambda: len(stage.desk.held) == 1)
        await settle()
        assert stage.released == []
        stage.receivers[1].gate.set()
        await stage.until(lambda: stage.released == [0])

    on_stage(scene)


def test_one_slow_engine_does_not_hold_back_what_another_reports():
    async def scene(stage: Stage) -> None:
        stage.receivers[1].gate.clear()
        stage.publish(0)
        await stage.until(lambda: bool(stage.desk.held))

    assert [report.engine for report in on_stage(scene).desk.held] == ["rollout-0"]


def test_an_engine_that_answers_late_is_named_with_the_setting_it_missed():
    async def scene(stage: Stage) -> None:
        stage.receivers[1].gate.clear()
        stage.publish(7)
        error = await failure_of(stage.run)
        assert type(error) is EngineError
        assert str(error) == "rollout-1 did not hold version 7 within weights.timeout_s = 0.005"
        assert stage.released == []

    on_stage(scene, **{"weights.timeout_s": 0.005})


def test_an_engine_that_refuses_is_heard_and_nothing_is_left_running():
    async def scene(stage: Stage) -> None:
        stage.receivers[0].fails = EngineError("rollout-0: version 1 arrived with digest x, published was y")
        stage.receivers[1].gate.clear()
        stage.publish(1)
        assert str(await failure_of(stage.run)) == "rollout-0: version 1 arrived with digest x, published was y"

    on_stage(scene)


def test_a_timeout_inside_an_engine_is_not_mistaken_for_the_publishers():
    async def scene(stage: Stage) -> None:
        stage.receivers[0].fails = TimeoutError("the child's socket")
        stage.publish(1)
        assert str(await failure_of(stage.run)) == "the child's socket"

    on_stage(scene, engines=1)


@pytest.mark.parametrize("error", [TransportError("no space left"), OSError("the disk is gone")])
def test_a_version_that_cannot_be_sent_ends_the_run_with_the_reason(error: Exception):
    async def scene(stage: Stage) -> None:
        stage.post.fails = error
        stage.publish(1)
        assert await failure_of(stage.run) is error
        assert not stage.receivers[0].received

    on_stage(scene)
