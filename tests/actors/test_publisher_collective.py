"""Tests the publisher over weights by broadcast, where one that is gone fails all: the rest connect again and get the
version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from actor_world import Desk, make_config, make_snapshot

from omni_async.actors.publisher import WeightPublisher
from omni_async.aio.clock import ManualClock
from omni_async.types import WeightManifest, WeightReport
from omni_async.weights.digest import verify
from omni_async.weights.transport.base import receive
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender

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
            self._receiver = CollectiveReceiver(
                self.name, TIMEOUT_S
            )  # its process is gone, and with it the connections
            raise ConnectionError("the actor died")


class Stage:
    def __init__(self, *participants: Participant) -> None:
        self.desk = Desk()
        sender = CollectiveSender("127.0.0.1", "cpu", TIMEOUT_S)
        config = make_config(**{"weights.timeout_s": TIMEOUT_S})
        self.publisher = WeightPublisher(config, {p.name: p for p in participants}, self.desk, sender, ManualClock())
        self.run = asyncio.create_task(self.publisher.run())

    def publish(self, version: int) -> None:
        self.publisher.withdraw()
        self.publisher.publish(make_snapshot(version))

    async def held(self, version: int, *names: str) -> None:
        await self.desk.until(lambda: {r.engine for r in self.desk.held if r.version == version} == set(names))


@asynccontextmanager
async def on_stage(*participants: Participant) -> AsyncIterator[Stage]:
    stage = Stage(*participants)
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

    async with on_stage(*rest[:position], dead, *rest[position:]) as stage:
        stage.publish(0)
        await stage.held(0, "dead", *names)
        stage.publish(1)
        await stage.held(1, *names)
        stage.publish(2)
        await stage.held(2, *names)
    assert stage.desk.lost == [("dead", "it did not take version 1: the actor died")]
    assert dead.received == [0]
    assert [one.received[-1] for one in rest] == [2] * others


async def test_one_that_dies_before_it_has_joined_is_lost_and_the_rest_form_the_group() -> None:
    rest = Participant("rollout-0")

    async with on_stage(Participant("dead", dies_at="join"), rest) as stage:
        stage.publish(0)
        await stage.held(0, "rollout-0")
    assert stage.desk.lost == [("dead", "it did not join the weight transport: the actor died")]
    assert rest.received == [0]


async def test_one_that_joins_forms_the_group_anew_with_all_the_others() -> None:
    first, joiner = Participant("rollout-0"), Participant("rollout-1")

    async with on_stage(first) as stage:
        stage.publish(0)
        await stage.held(0, "rollout-0")
        await stage.publisher.admit(joiner.name, joiner)
        await stage.held(0, "rollout-0", "rollout-1")
        stage.publish(1)
        await stage.held(1, "rollout-0", "rollout-1")
    assert stage.desk.lost == []
    assert (first.joined, joiner.joined) == (2, 1)
    assert joiner.received == [0, 1]


async def test_when_all_have_died_the_next_that_joins_gets_the_newest_version() -> None:
    joiner = Participant("rollout-1")

    async with on_stage(Participant("dead", dies_at=1)) as stage:
        stage.publish(0)
        await stage.held(0, "dead")
        stage.publish(1)
        await stage.desk.until(lambda: bool(stage.desk.lost))
        stage.publish(2)
        await stage.publisher.admit(joiner.name, joiner)
        await stage.held(2, "rollout-1")
    assert [version for version, _ in stage.desk.announced] == [0, 1, 2]


async def test_one_that_is_dismissed_is_not_waited_for_by_the_next_version() -> None:
    rest, gone = Participant("rollout-0"), Participant("gone")

    async with on_stage(rest, gone) as stage:
        stage.publish(0)
        await stage.held(0, "rollout-0", "gone")
        stage.publisher.remove_engine("gone")
        stage.publish(1)
        await stage.held(1, "rollout-0")
    assert stage.desk.lost == []
    assert gone.received == [0]
