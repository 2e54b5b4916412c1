"""Tests the producer: leases, failures, and what each `weights.swap` lets in when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.aio.clock import ManualClock
from omni_async.roles.producer import Producer, _Finished
from omni_async.roles.trajectories import Stored
from omni_async.rollout.base import EngineError
from omni_async.rollout.calls import Draw
from omni_async.store import LocalStore, ObjectLost
from omni_async.types import Prompt, SdeWindow, VersionSpans, WeightManifest, WeightReport
from omni_async.weights.digest import WeightError
from omni_async.weights.transport.base import Transfer, TransportError
from tests.roles.actor_world import Desk, HandEngine, failure_of, make_config, make_request
from tests.support.loops import settle


@asynccontextmanager
async def on_stage(
    offered: int = 0, clock: ManualClock | None = None, receiver: Any = None, **changes: Any
) -> AsyncIterator[tuple[Producer, HandEngine, Desk, asyncio.Task[None]]]:
    """Runs a producer with `offered` samples to lease; the desk closes when the scene is over."""
    engine, desk = HandEngine(), Desk()
    clock, config = clock or ManualClock(), make_config(**changes)
    producer = Producer("rollout-0", config, engine, desk, LocalStore(), clock, receiver)
    await producer.start()
    desk.offer(*(make_request(i) for i in range(offered)))
    run = asyncio.create_task(producer.run())
    await settle()
    yield producer, engine, desk, run
    desk.close()
    await settle()
    await asyncio.gather(run, return_exceptions=True)
    assert (engine.closed, engine.running) == (1, {})


def receive(producer: Producer, version: int = 1, *buckets: str) -> Coroutine[Any, Any, WeightReport]:
    manifest = WeightManifest(version, "full", f"digest-{version}", ())
    return producer.receive_weights(manifest, Transfer("start", [*buckets]))


async def swapping(producer: Producer) -> asyncio.Task[WeightReport]:
    swap = asyncio.create_task(receive(producer))
    await settle()
    return swap


@pytest.mark.parametrize(("offered", "failing"), [(3, [1]), (9, [0]), (4, [0, 1, 2, 3])])
async def test_an_engine_failure_ends_the_run(offered, failing):
    async with on_stage(offered=offered) as (_, engine, desk, run):
        await engine.finish(*failing, error=EngineError("the device fell off the bus"))
        with pytest.raises(EngineError, match=r"^the device fell off the bus$"):
            await run
        assert not desk.failed and not desk.done


async def test_every_end_closes_the_engine():
    """`on_stage` checks it."""
    async with on_stage(offered=3) as (_, _, desk, run):
        desk.close()
        await run
        assert desk.done == desk.failed == []
    async with on_stage(offered=3) as (_, engine, _, run):
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    async with on_stage(offered=1) as (_, engine, desk, run):
        desk.refuses = ConnectionError("the coordinator died")
        await engine.finish(0)
        assert await failure_of(run) is desk.refuses


async def test_spans_show_no_wait_while_a_sample_runs():
    clock = ManualClock()
    async with on_stage(offered=1, clock=clock) as (producer, engine, desk, run):
        clock.advance(5.0)
        await engine.finish(0)
        clock.advance(3.0)
        desk.offer(make_request(1))
        await settle()
        clock.advance(2.0)
        await engine.finish(1)
        await receive(producer)
        desk.close()
        await run
        assert {span.kind for span in desk.spans} == {"generate", "stage", "swap", "backpressured"}
        assert [(span.start, span.end) for span in desk.spans if span.kind == "backpressured"] == [(5.0, 8.0)]
        generate = next(span.args for span in desk.spans if span.kind == "generate")
        assert (generate["sample"], generate["versions"]) == ("g0.s0", "0")
        assert (generate["trajectory_bytes"], generate["media_bytes"]) == (3 * 6 * 4 * 4, 32 * 48 * 3)


async def test_several_calls_make_one_sample():
    async def twice(prompt: Prompt, draw: Draw) -> None:
        await draw(prompt)
        await draw(replace(prompt, text="again"))

    async with on_stage() as (producer, engine, desk, _):
        producer.program = twice
        desk.offer(replace(make_request(0, window=SdeWindow(3, 2)), calls=2))
        await settle()
        for call, version in enumerate((1, 3)):
            assert [*engine.running] == [f"g0.s0.c{call}"] and not desk.done
            engine.version = version  # for the call's last step
            await engine.finish(f"0.c{call}")
        (result,) = desk.done
        assert (result.sample_id, list(result.step_versions), result.version) == ("g0.s0", [0, 1, 1, 3], 0)


@pytest.mark.parametrize(("kind", "spans"), [("train", ((0, 2), (3, 5))), ("validation", ())])
async def test_an_answer_has_the_version_of_every_token(kind, spans):
    """Its number of tokens is no number of denoising steps."""
    drawn = ((0, 2), (3, 5))
    request = replace(make_request(0, window=None), kind=kind, spec=SimpleNamespace(most_tokens=9))
    finished = _Finished(request, np.zeros(1), np.zeros(1), VersionSpans(drawn), 0.0, 1.0, 1, 0)
    result = finished.result("rollout-0", Stored(None, 0, ()), None)
    assert (result.step_versions.spans, result.version) == (spans, 0)
    plain = finished._replace(request=replace(request, spec=None, num_inference_steps=3))
    expected = ((0, 2), (3, 1)) if kind == "train" else ()
    assert plain.result("rollout-0", Stored(None, 0, ()), None).step_versions.spans == expected


async def test_leases_fill_the_engine():
    async with on_stage(offered=1) as (_, engine, desk, _):
        desk.offer(*(make_request(i) for i in range(1, 10)))
        await settle()
        assert sorted(engine.running) == ["g0.s0", "g0.s1", "g0.s2", "g0.s3"]
        assert [free for free, _ in desk.asked] == [4, 3]
        for finished in range(6):
            await engine.finish(finished)
            assert len(engine.running) == 4
        assert all(1 <= free <= capacity == 4 for free, capacity in desk.asked)
        assert engine.started == [f"g0.s{i}" for i in range(10)]
        assert desk.phases == ["rollout-0: attention SDPA"]
        await engine.finish(6, 7, 8)
        assert len(desk.reports[-1]) == 3, "one message"
        image = desk.done[0].media.pixels
        assert image.shape == (32, 48, 3) and image[0, 0].tolist() == [0, 1, 2]
        assert set(desk.done[0].trajectory.keys()) == {"latents"}


@pytest.mark.parametrize("error", [ValueError("no such prompt"), TimeoutError("the decoder's socket")])
async def test_failed_samples_are_reported_alone(error):
    async with on_stage(offered=3) as (_, engine, desk, run):
        await engine.finish(1, error=error)
        assert desk.failed == [("g0.s1", f"{type(error).__name__}: {error}")]
        await engine.finish(0, 2)
        assert [result.sample_id for result in desk.done] == ["g0.s0", "g0.s2"]
        assert not run.done()


async def test_hanging_or_cancelled_samples_mean_a_broken_engine():
    async with on_stage(offered=1, **{"rollout.timeout_s": 0.005}) as (*_, run):
        with pytest.raises(EngineError, match=r"sample g0\.s0 took longer than rollout\.timeout_s = 0\.005"):
            await run
    async with on_stage(offered=1) as (_, engine, _, run):
        engine.running["g0.s0"].cancel()  # as a broken library does
        with pytest.raises(EngineError, match=r"g0\.s0 was cancelled by the engine"):
            await run


async def test_swap_request_waits_for_running_samples():
    async with on_stage(offered=4, **{"weights.swap": "request"}) as (producer, engine, desk, _):
        assert sorted(engine.running) == ["g0.s0", "g0.s1"]  # a batch: the other two are leased, not started
        swap = await swapping(producer)
        await engine.finish(0)
        assert list(engine.running) == ["g0.s1"]
        assert not engine.swaps
        await engine.finish(1)
        await swap
        await settle()
        assert (engine.swaps, sorted(engine.running)) == ([(1, [])], ["g0.s2", "g0.s3"])
        await engine.finish(2, 3)
        assert {f"g0.s{i}": i // 2 for i in range(4)} == {result.sample_id: result.version for result in desk.done}


async def test_swap_drain_waits_for_leased_samples():
    async with on_stage(offered=4, **{"weights.swap": "drain"}) as (producer, engine, desk, _):
        swap = await swapping(producer)
        desk.offer(make_request(4), make_request(5))
        await engine.finish(0)
        assert "g0.s4" not in engine.started
        await engine.finish(1, 2)
        assert not engine.swaps
        await engine.finish(3)
        assert (await swap).version == 1
        await settle()
        assert (engine.swaps, sorted(engine.running)) == ([(1, [])], ["g0.s4", "g0.s5"])


async def test_swap_drain_holds_back_an_earlier_lease():
    async with on_stage(**{"weights.swap": "drain"}) as (producer, engine, desk, _):
        engine.swap_gate = asyncio.Event()
        swap = await swapping(producer)
        desk.offer(make_request(0))  # answers a lease requested before the drain
        await settle()
        assert not engine.started
        engine.swap_gate.set()
        await swap
        await settle()
        await engine.finish(0)
        assert desk.done[0].step_versions == VersionSpans.of((1, 1))


async def test_swap_step_waits_for_nothing_and_wrong_weights_are_refused():
    async with on_stage(offered=1) as (producer, engine, desk, _):
        assert (await receive(producer)).version == 1
        assert engine.swaps == [(1, ["g0.s0"])]
        engine.arrives = "something else"
        why = "rollout-0: version 2 arrived with digest something else, published was digest-2"
        with pytest.raises(EngineError, match=why):
            await receive(producer, 2)
        assert len(engine.swaps) == 1
        desk.offer(make_request(1))
        await settle()
        assert "g0.s1" in engine.running


class Courier:
    """A receiver of given bytes."""

    def __init__(self) -> None:
        self.joined: list[Any] = []
        self.fails: Exception | None = None

    async def init(self, membership: Any) -> None:
        self.joined.append(membership)

    async def start(self, manifest: WeightManifest, start: Any) -> None:
        self._manifest, self._updates = manifest, [start]

    async def update(self, bucket: Any) -> None:
        self._updates.append(bucket)

    async def finish(self) -> tuple[WeightManifest, list[Any]]:
        if self.fails:
            raise self.fails
        return self._manifest, self._updates


async def test_weights_come_from_the_receiver():
    courier = Courier()
    async with on_stage(receiver=courier) as (producer, engine, *_):
        await producer.join_weights("here")
        await asyncio.gather(*(receive(producer, version, "first", "second") for version in (1, 2)))
        assert (courier.joined, engine.staged) == (["here"], ["start", "first", "second"])
        assert [version for version, _ in engine.swaps] == [1, 2]
        for error in (ObjectLost("the node is gone"), WeightError("the file is truncated")):
            courier.fails = error
            with pytest.raises(EngineError, match=f"^rollout-0: version 3 did not arrive: {error}$"):
                await receive(producer, 3)
        courier.fails = TransportError("another participant is gone")
        assert await failure_of(receive(producer, 3)) is courier.fails
