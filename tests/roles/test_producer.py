"""Tests the producer: leases, failures, and what each `weights.swap` lets in when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.aio.clock import ManualClock
from omni_async.roles.producer import Producer
from omni_async.rollout.base import EngineError
from omni_async.rollout.calls import Draw
from omni_async.store import LocalStore, ObjectLost
from omni_async.types import Prompt, SdeWindow, VersionSpans, WeightManifest, WeightReport
from omni_async.weights.digest import WeightError
from omni_async.weights.transport.base import Parcel, TransportError
from tests.roles.actor_world import Desk, HandEngine, failure_of, make_config, make_manifest, make_request
from tests.support.loops import settle


@asynccontextmanager
async def on_stage(
    offered: int = 0, clock: ManualClock | None = None, **changes: Any
) -> AsyncIterator[tuple[Producer, HandEngine, Desk, asyncio.Task[None]]]:
    """Runs a producer with `offered` samples to lease; the desk closes when the scene is over."""
    engine, desk = HandEngine(), Desk()
    producer = Producer("rollout-0", make_config(**changes), engine, desk, LocalStore(), clock or ManualClock())
    await producer.start()
    desk.offer(*(make_request(i) for i in range(offered)))
    run = asyncio.create_task(producer.run())
    await settle()
    yield producer, engine, desk, run
    desk.close()
    await settle()
    for waiting in [] if run.done() else list(engine.running.values())[:1]:
        waiting.set_result(None)  # a full producer asks, and learns of the end, when a sample is done
    await asyncio.gather(run, return_exceptions=True)
    assert engine.closed == 1
    assert not engine.running


def receive(producer: Producer, version: int = 1, *buckets: str) -> Coroutine[Any, Any, WeightReport]:
    return producer.receive_weights(make_manifest(version), Parcel("start", [*buckets]))


async def swapping(producer: Producer) -> asyncio.Task[WeightReport]:
    swap = asyncio.create_task(receive(producer))
    await settle()
    return swap


async def test_it_leases_while_samples_run_and_never_asks_for_more_than_fits():
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


async def test_the_kernels_of_an_engine_are_reported_when_it_starts():
    for uses, reported in (("attention SDPA, compiled", ["rollout-0: attention SDPA, compiled"]), ("", [])):
        engine, desk = HandEngine(), Desk()
        engine.uses = uses
        await Producer("rollout-0", make_config(), engine, desk, LocalStore(), ManualClock()).start()
        assert desk.phases == reported


async def test_a_finished_sample_carries_the_versions_of_its_trained_steps_and_an_image_a_scorer_can_take():
    async with on_stage(offered=1) as (_, engine, desk, _):
        engine.version = 2
        desk.offer(make_request(1), make_request(2, window=None), make_request(3, window=None, kind="train"))
        await settle()
        engine.version = 3  # from here on, that is for the last step
        await engine.finish(0, 1, 2, 3)
        spans = {result.sample_id: (result.version, result.step_versions.spans) for result in desk.done}
        assert spans == {
            "g0.s0": (0, ((0, 2),)),
            "g0.s1": (2, ((2, 2),)),
            "g0.s2": (2, ()),  # noise-free: nothing is trained
            "g0.s3": (2, ((2, 4), (3, 1))),  # no window: all steps are
        }
        image = desk.done[0].media.pixels
        assert image.shape == (32, 48, 3) and image[0, 0].tolist() == [0, 1, 2]
        assert set(desk.done[0].trajectory.keys()) == {"latents"}


@pytest.mark.parametrize(
    ("offered", "failing"),
    [
        pytest.param(3, [1], id="it waits for a lease"),
        pytest.param(9, [0], id="the engine is full"),
        pytest.param(4, [0, 1, 2, 3], id="many samples meet the same dead engine"),
    ],
)
async def test_an_engine_failure_ends_the_run_and_no_exception_is_lost(offered, failing):
    async with on_stage(offered=offered) as (_, engine, desk, run):
        await engine.finish(*failing, error=EngineError("the device fell off the bus"))
        error = await failure_of(run)
        assert type(error) is EngineError and str(error) == "the device fell off the bus"
        assert not desk.failed and not desk.done


@pytest.mark.parametrize("error", [ValueError("no such prompt"), TimeoutError("the decoder's socket")])
async def test_a_failed_sample_is_reported_and_the_others_go_on(error):
    async with on_stage(offered=3) as (_, engine, desk, run):
        await engine.finish(1, error=error)
        assert desk.failed == [("g0.s1", f"{type(error).__name__}: {error}")]
        await engine.finish(0, 2)
        assert [result.sample_id for result in desk.done] == ["g0.s0", "g0.s2"]
        assert not run.done()


async def test_a_sample_that_never_comes_or_that_the_engine_itself_cancels_means_that_the_engine_is_broken():
    async with on_stage(offered=1, **{"rollout.timeout_s": 0.005}) as (_producer, _engine, _desk, run):
        error = await failure_of(run)
        assert type(error) is EngineError
        assert "sample g0.s0 took longer than rollout.timeout_s = 0.005" in str(error)
    async with on_stage(offered=1) as (_, engine, _desk, run):
        engine.running["g0.s0"].cancel()  # as a library does when it breaks; no role would own the sample
        error = await failure_of(run)
        assert isinstance(error, EngineError) and "g0.s0 was cancelled by the engine" in str(error)


async def test_the_end_of_the_run_its_cancellation_and_a_coordinator_that_is_gone_close_the_engine():
    async with on_stage(offered=3) as (_, engine, desk, run):
        desk.close()
        await run
        assert not engine.running
        assert desk.done == desk.failed == []
    async with on_stage(offered=3) as (_, engine, _, run):
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    async with on_stage(offered=1) as (_, engine, desk, run):
        desk.refuses = ConnectionError("the coordinator died")
        await engine.finish(0)
        assert await failure_of(run) is desk.refuses


async def test_samples_that_finish_together_are_handed_over_together():
    async with on_stage(offered=4) as (_, engine, desk, _):
        messages: list[list[str]] = []
        report, gate = desk.samples_done, asyncio.Event()

        async def samples_done(name, results):
            messages.append([result.sample_id for result in results])
            await gate.wait()
            await report(name, results)

        desk.samples_done = samples_done
        await engine.finish(0, 1, 2)
        await engine.finish(3)
        assert len(messages) == 1
        gate.set()
        await settle()
        assert messages == [["g0.s0", "g0.s1", "g0.s2"], ["g0.s3"]]
        assert [result.sample_id for result in desk.done] == ["g0.s0", "g0.s1", "g0.s2", "g0.s3"]


async def test_swap_step_does_not_wait_for_running_samples():
    async with on_stage(offered=3, **{"weights.swap": "step"}) as (producer, engine, _desk, _):
        assert (await receive(producer)).version == 1
        assert engine.swaps == [(1, ["g0.s0", "g0.s1", "g0.s2"])]


async def test_swap_request_waits_for_running_samples_while_leased_ones_wait_for_it():
    async with on_stage(offered=4, **{"weights.swap": "request"}) as (producer, engine, desk, _):
        # As many as the batch takes: the others are leased, not started.
        assert sorted(engine.running) == ["g0.s0", "g0.s1"]
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


async def test_swap_drain_waits_for_everything_leased_and_leases_nothing_meanwhile():
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


async def test_swap_drain_keeps_a_lease_that_was_asked_for_before_out_of_the_engine():
    async with on_stage(offered=0, **{"weights.swap": "drain"}) as (producer, engine, desk, _):
        engine.swap_gate = asyncio.Event()
        swap = await swapping(producer)
        desk.offer(make_request(0))  # answers the question asked before the drain
        await settle()
        assert not engine.started
        engine.swap_gate.set()
        await swap
        await settle()
        assert engine.started == ["g0.s0"]
        await engine.finish(0)
        assert desk.done[0].step_versions == VersionSpans.of((1, 1))


@pytest.mark.parametrize("swap", ["step", "request", "drain"])
async def test_weights_with_another_digest_are_refused_and_generation_may_go_on(swap):
    async with on_stage(offered=1, **{"weights.swap": swap}) as (producer, engine, desk, _):
        engine.arrives = "something else"
        error = await failure_of(receive(producer))
        assert type(error) is EngineError
        assert "rollout-0: version 1 arrived with digest something else, published was digest-1" in str(error)
        assert not engine.swaps
        desk.offer(make_request(1))
        await settle()
        assert "g0.s1" in engine.running


class Courier:
    """A receiver that returns what the test gives it."""

    def __init__(self, *brings: Any, fails: Exception | None = None) -> None:
        self.joined: list[Any] = []
        self._brings, self._fails = brings, fails

    async def init(self, invitation: Any) -> None:
        self.joined.append(invitation)

    async def start(self, manifest: WeightManifest, start: Any) -> None:
        self._manifest, self._updates = manifest, [start]

    async def update(self, bucket: Any) -> None:
        self._updates.append(bucket)

    async def finish(self) -> tuple[WeightManifest, list[Any]]:
        if self._fails:
            raise self._fails
        return self._manifest, [*self._brings, *self._updates]


def receiving(courier: Courier) -> tuple[Producer, HandEngine]:
    engine = HandEngine()
    return Producer("rollout-0", make_config(), engine, Desk(), LocalStore(), ManualClock(), courier), engine


async def test_weights_come_from_the_receiver_it_was_given_one_version_after_the_other():
    producer, engine = receiving(courier := Courier("bytes"))
    await producer.join_weights("here")
    await asyncio.gather(*(receive(producer, version, "first", "second") for version in (1, 2)))
    assert courier.joined == ["here"]
    assert engine.staged == ["bytes", "start", "first", "second"]
    assert [version for version, _ in engine.swaps] == [1, 2]


@pytest.mark.parametrize("error", [ObjectLost("the node is gone"), WeightError("the file is truncated")])
async def test_weights_that_do_not_arrive_are_the_engines_failure_unless_the_transport_failed(error):
    failure = await failure_of(receive(receiving(Courier(fails=error))[0]))
    assert type(failure) is EngineError
    assert str(failure) == f"rollout-0: version 1 did not arrive: {error}"
    gone = TransportError("another participant is gone")  # all receive together
    assert await failure_of(receive(receiving(Courier(fails=gone))[0])) is gone


async def test_what_it_did_is_told_as_spans_and_no_wait_while_a_sample_ran_although_it_had_asked_for_more_before():
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


async def test_a_sample_of_several_calls_is_one_with_the_versions_of_every_calls_trained_steps():
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
