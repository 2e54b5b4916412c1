"""Tests the emulated engine in virtual time: replaying a profile, and step by step with real trajectories."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from omni_async.config.rollout import Emulated
from omni_async.diffusion.sde.transitions import log_prob, transition
from omni_async.media import require_media
from omni_async.performance.profile import Payload, ServiceTime
from omni_async.plugins.families import MediaShape, SamplingSpec
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.emulated import EmulatedEngine, RandomPayload, ReplayedTimes, StepTimes
from omni_async.rollout.stepping import ZeroVelocity, flat_media
from tests.rollout.conftest import Published, damaged, make_request, publish
from tests.simulation.simulation_world import make_profile

pytestmark = pytest.mark.virtual_time

PROFILE = msgspec.structs.replace(
    make_profile(generate=(2.0, 2.0), publish=3.0, swap=0.5),
    payload=Payload(trajectory=5000, media=300, weights=100),
)


def request(number: int) -> Any:
    return make_request(number, seed=number * 1_000_003, num_inference_steps=10)


def weights(version: int) -> Published:
    return publish(version, {"bucket": torch.full((25,), float(version))})


@asynccontextmanager
async def started(engine: EmulatedEngine) -> AsyncIterator[EmulatedEngine]:
    report = await engine.start()
    assert (report.engine, report.version, report.digest) == (engine.name, 0, "")
    try:
        yield engine
    finally:
        await engine.close()


def replaying(name: str = "rollout-0", seed: int = 1, **profile: Any) -> Any:
    replayed = msgspec.structs.replace(PROFILE, **profile)
    times = ReplayedTimes(name, replayed, seed, max_batch=4)
    return started(EmulatedEngine(name, times, RandomPayload(replayed.payload, seed), max_batch=4))


def stepping(**times: float) -> Any:
    make = ZeroVelocity(lambda spec: (spec.height * spec.width // 256, 8))
    return started(EmulatedEngine("engine", StepTimes(Emulated(**({"step_s": 0.0} | times))), make, max_batch=4))


async def later(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    await asyncio.sleep(seconds)
    await work


async def ends(*works: Coroutine[Any, Any, Any]) -> list[float]:
    """Returns when each was done."""

    async def end(work: Coroutine[Any, Any, Any]) -> float:
        await work
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(end(work) for work in works)))


async def test_samples_wait_for_the_next_job():
    async with replaying() as engine:
        both = engine.generate(request(0)), later(0.004, engine.generate(request(1)))  # a message later: one batch
        other = make_request(2, num_inference_steps=5)
        works = *both, later(1.0, engine.generate(request(3))), later(2.0, engine.generate(other))
        assert await ends(*works) == pytest.approx([6.0, 6.0, 10.0, 14.0])


async def test_publishes_take_all_engines_the_same_time():
    first, *others = (replaying(f"rollout-{i}", publish=ServiceTime(fixed_s=3.0, cv=0.5)) for i in range(3))
    async with first as one, others[0] as two, others[1] as three:
        times = await ends(*(engine.stage(*weights(1)) for engine in (one, two, three)))
    assert len(set(times)) == 1 and times[0] != 3.0


async def test_damaged_weights_are_refused():
    async with replaying() as engine:
        with pytest.raises(EngineError, match=r"rollout-0: .*digest"):
            await engine.stage(*damaged(weights(1)))
        with pytest.raises(EngineError, match="asked for version 1, staged is None"):
            await engine.swap(1)
        await engine.stage(*weights(2))
        with pytest.raises(EngineError, match="asked for version 1, staged is 2"):
            await engine.swap(1)
        assert (await engine.swap(2)).version == 2


async def test_random_times_depend_on_seed_and_engine():
    random_times = ServiceTime(unit_s=2.0, cv=0.5)

    async def drawn(seed: int) -> list[float]:
        async with replaying(seed=seed, generate=random_times) as engine:
            began = asyncio.get_running_loop().time()
            return [end - began for end in await ends(*(engine.generate(request(i)) for i in range(8)))]

    first = await drawn(1)
    assert await drawn(1) == pytest.approx(first)
    assert await drawn(2) != pytest.approx(first)
    assert first[0] == pytest.approx(random_times.sampler(random.Random("1/rollout-0"))(4))


async def test_payloads_are_the_samples_own():
    async with replaying() as engine:
        zero, one, again = await asyncio.gather(*(engine.generate(request(i % 2)) for i in range(3)))
    assert (zero.tensors.nbytes, zero.media.nbytes, zero.media.dtype) == (5000, 300, np.uint8)
    assert not np.array_equal(zero.tensors, one.tensors) and not np.array_equal(zero.media, one.media)
    assert np.array_equal(zero.tensors, again.tensors) and np.array_equal(zero.media, again.media)
    async with replaying(payload=Payload()) as engine:
        made = await engine.generate(request(0))
        assert (made.tensors.nbytes, made.media.nbytes) == (0, 8), "room for the seed"


async def test_closing_fails_all_calls():
    async with replaying() as engine:
        tasks = [asyncio.create_task(engine.generate(request(i))) for i in range(6)]
        await engine.stage(*weights(1))
        tasks.append(asyncio.create_task(engine.swap(1)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(request(9))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(EngineError, "rollout-0 was closed")] * 7
    async with replaying() as engine:
        waits = engine.generate(request(0))
        waits.send(None)  # up to its wait, before the engine's task begins
        await engine.close()
        with pytest.raises(EngineError, match="rollout-0 was closed"):
            waits.send(None)


async def test_failures_reach_waiters_and_later_callers():
    def broken(*_: Any, **__: Any) -> float:
        raise OSError("the device fell off the bus")

    async with replaying() as engine:
        forsaken = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(1.0)
        forsaken.cancel()
        assert await ends(engine.generate(request(1))) == pytest.approx([8.0])
        engine._device.busy = broken
        with pytest.raises(EngineError, match="OSError: the device fell off the bus"):
            await engine.generate(request(0))
        with pytest.raises(EngineError, match="is not running: OSError: the device fell off the bus"):
            await engine.generate(request(1))


async def test_log_probs_are_those_of_velocity_zero():
    request = make_request(1)
    async with stepping() as engine:
        requests = [*(make_request(i) for i in range(6)), *(make_request(i, num_inference_steps=i) for i in (0, 1))]
        _, made, *others = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        again = await engine.generate(request)
    assert [type(one) for one in others] == [Trajectory] * 4 + [ValueError] * 2
    assert all(torch.equal(again.tensors[key], made.tensors[key]) for key in ("latents", "log_probs", "means", "final"))
    assert torch.equal(again.media.image, made.media.image)
    x, sigmas, steps = made.tensors["latents"], made.tensors["sigmas"], made.tensors["steps"]
    nowhere, first, rows = torch.zeros_like(x[:-1]), sigmas[1].expand(3), torch.full((3,), request.noise_level)
    expected = transition("flow", x[:-1], nowhere, sigmas[steps], sigmas[steps + 1], first, rows)
    assert_close(made.tensors["log_probs"], log_prob("flow", x[1:], expected.mean, expected.scale), rtol=0, atol=1e-6)
    assert made.media.image.shape == (3, 64, 32)
    assert made.versions.spans == ((0, 6),)


async def test_samples_join_between_steps_and_new_weights_too():
    manifest, buckets = weights(7)
    async with stepping(step_s=1.5, per_sample_s=0.5, decode_s=1.0) as engine:
        works = [engine.generate(make_request(0)), engine.generate(make_request(1))]
        # Six steps each, 2 s with two samples, 2.5 s with three; the third joins at 4 s, and decoding takes 1 s each.
        assert await ends(*works, later(2.5, engine.generate(make_request(2)))) == pytest.approx([15.0, 16.0, 20.0])
    async with stepping(step_s=1.0) as engine:
        began = asyncio.get_running_loop().time()
        running = [asyncio.create_task(engine.generate(make_request(i))) for i in range(5)]
        await engine.stage(manifest, buckets)
        await asyncio.sleep(2.5)
        report = await engine.swap(7)
        assert (report.version, report.digest) == (7, manifest.digest)
        assert asyncio.get_running_loop().time() - began == 3.0
        made = await asyncio.gather(*running)
        assert [one.versions.spans for one in made] == [((0, 3), (7, 3))] * 4 + [((7, 6),)], "four are a batch"


def test_media_have_the_specs_shapes_and_a_level_of_the_seed():
    class Film(SamplingSpec, frozen=True):
        def media(self) -> tuple[MediaShape, ...]:
            return MediaShape("video", (4, 3, 6, 8), 12), MediaShape("audio", (2, 100), 8000)

    media = [flat_media(seed, Film()) for seed in (1, 1, 2)]
    require_media(media, Film())
    for part in ("video", "audio"):
        one, same, other = (getattr(made, part) for made in media)
        assert torch.equal(one, same) and not torch.equal(one, other)
