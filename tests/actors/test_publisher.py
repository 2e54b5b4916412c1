"""The weight publisher: newest first, announced before delivered, and an engine that does not answer is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from actor_world import Desk, failure_of, make_config, make_manifest, play, settle

from omni_async.actors.publisher import WeightPublisher
from omni_async.control.clock import ManualClock
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest, WeightReport


class Receiver:
    """A producer that takes weights when its gate is open."""

    def __init__(self, name: str, desk: Desk) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.received: list[tuple[int, list[Any]]] = []
        self.fails: Exception | None = None
        self._desk = desk

    async def receive_weights(self, manifest: WeightManifest, buckets: list[Any]) -> WeightReport:
        self._desk.log.append(f"{self.name} receives {manifest.version}")
        self.received.append((manifest.version, buckets))
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return WeightReport(self.name, manifest.version, manifest.digest)


Scene = Callable[[WeightPublisher, list[Receiver], "asyncio.Task[None]"], Awaitable[None]]


def on_stage(scene: Scene, engines: int = 2, **changes: float) -> Desk:
    desk = Desk()

    async def main() -> None:
        receivers = [Receiver(f"rollout-{i}", desk) for i in range(engines)]
        publisher = WeightPublisher(make_config(**changes), {r.name: r for r in receivers}, desk, ManualClock())
        run = asyncio.create_task(publisher.run())
        await scene(publisher, receivers, run)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    play(main())
    return desk


def test_a_version_is_announced_then_delivered_to_every_engine_and_their_reports_reach_the_coordinator():
    async def scene(publisher, receivers, run):
        await publisher.publish(make_manifest(0), ["bucket"])
        await settle()
        assert [r.received for r in receivers] == [[(0, ["bucket"])]] * 2

    desk = on_stage(scene)
    assert desk.log[0] == "announce 0"
    assert {"rollout-0 receives 0", "rollout-1 receives 0"} < set(desk.log)
    assert sorted(report.engine for report in desk.held) == ["rollout-0", "rollout-1"]
    assert {report.digest for report in desk.held} == {"digest-0"}
    assert [span.kind for span in desk.spans] == ["publish"]


def test_publish_returns_at_once_and_the_newest_version_replaces_a_waiting_one():
    async def scene(publisher, receivers, run):
        receivers[1].gate.clear()
        for version in range(4):
            await publisher.publish(make_manifest(version), [])
            await settle()
        assert [version for version, _ in receivers[0].received] == [0]
        receivers[1].gate.set()
        await settle()
        assert [version for version, _ in receivers[0].received] == [0, 3]
        assert [version for version, _ in receivers[1].received] == [0, 3]

    assert on_stage(scene).announced == [(0, "digest-0"), (3, "digest-3")]


def test_one_slow_engine_does_not_hold_back_what_another_reports():
    async def scene(publisher, receivers, run):
        receivers[1].gate.clear()
        await publisher.publish(make_manifest(0), [])
        await settle()

    assert [report.engine for report in on_stage(scene).held] == ["rollout-0"]


def test_an_engine_that_answers_late_is_named_with_the_setting_it_missed():
    async def scene(publisher, receivers, run):
        receivers[1].gate.clear()
        await publisher.publish(make_manifest(7), [])
        error = await failure_of(run)
        assert type(error) is EngineError
        assert str(error) == "rollout-1 did not hold version 7 within weights.timeout_s = 0.005"

    on_stage(scene, **{"weights.timeout_s": 0.005})


def test_an_engine_that_refuses_is_heard_and_nothing_is_left_running():
    async def scene(publisher, receivers, run):
        receivers[0].fails = EngineError("rollout-0: version 1 arrived with digest x, published was y")
        receivers[1].gate.clear()
        await publisher.publish(make_manifest(1), [])
        assert str(await failure_of(run)) == "rollout-0: version 1 arrived with digest x, published was y"

    on_stage(scene)


def test_a_timeout_inside_an_engine_is_not_mistaken_for_the_publishers():
    async def scene(publisher, receivers, run):
        receivers[0].fails = TimeoutError("the child's socket")
        await publisher.publish(make_manifest(1), [])
        assert str(await failure_of(run)) == "the child's socket"

    on_stage(scene, engines=1)
