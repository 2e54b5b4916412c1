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

from omni_async.config.schema import Emulated
from omni_async.diffusion.sde.transitions import log_prob, transition
from omni_async.media import require_media
from omni_async.performance.profile import Payload, Profile, ServiceTime
from omni_async.plugins.families import MediaShape, SamplingSpec
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.emulated import EmulatedEngine, RandomPayload, ReplayedTimes, StepTimes
from omni_async.rollout.stepping import ZeroVelocity, flat_media
from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.snapshot import Snapshot
from tests.rollout.conftest import make_request

pytestmark = pytest.mark.virtual_time

PROFILE = Profile(
    name="p",
    source="a test",
    generate=ServiceTime(fixed_s=2.0, unit_s=2.0),
    score=ServiceTime(),
    train=ServiceTime(),
    publish=ServiceTime(fixed_s=3.0),
    swap=ServiceTime(fixed_s=0.5),
    switch=ServiceTime(fixed_s=7.0),
    payload=Payload(trajectory=5000, media=300, weights=100),
)


def request(number: int) -> Any:
    return make_request(number, seed=number * 1_000_003, num_inference_steps=10)


def weights(version: int) -> tuple[WeightManifest, list[np.ndarray]]:
    bucket = np.full(100, version, np.uint8)
    snapshot = Snapshot(version, "full", (TensorSpec("bucket.0", "uint8", (100,), (Piece(0, 0, 100),)),), [bucket])
    return snapshot.manifest(), [bucket]


@asynccontextmanager
async def started(engine: EmulatedEngine) -> AsyncIterator[EmulatedEngine]:
    report = await engine.start()
    assert (report.engine, report.version, report.digest) == (engine.name, 0, "")
    try:
        yield engine
    finally:
        await engine.close()


def replaying(name: str = "rollout-0", seed: int = 1, takes_turns: bool = False, **profile: Any) -> Any:
    """Starts an engine of at most four samples a job."""
    replayed = msgspec.structs.replace(PROFILE, **profile)
    times = ReplayedTimes(name, replayed, seed, max_batch=4, takes_turns=takes_turns)
    return started(EmulatedEngine(name, times, RandomPayload(replayed.payload, seed), max_batch=4))


def stepping(**times: float) -> Any:
    make = ZeroVelocity(lambda spec: (spec.height * spec.width // 256, 8))
    return started(EmulatedEngine("engine", StepTimes(Emulated(**({"step_s": 0.0} | times))), make, max_batch=4))


async def later(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    await asyncio.sleep(seconds)
    await work


async def ends(*works: Coroutine[Any, Any, Any]) -> list[float]:
    """Returns the time when each of them was done."""

    async def end(work: Coroutine[Any, Any, Any]) -> float:
        await work
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(end(work) for work in works)))


@pytest.mark.parametrize(
    ("after", "times"),
    [
        pytest.param(1.0, [4.0, 8.0], id="while a job runs: it waits for the next"),
        pytest.param(0.004, [6.0, 6.0], id="a message later: one batch, and the device does not wait for it"),
    ],
)
async def test_a_sample_that_comes_later(after, times):
    async with replaying() as engine:
        both = engine.generate(request(0)), later(after, engine.generate(request(1)))
        assert await ends(*both) == pytest.approx(times)


async def test_samples_of_another_number_of_steps_are_another_job():
    async with replaying() as engine:
        both = request(0), make_request(1, num_inference_steps=5)
        assert await ends(*map(engine.generate, both)) == pytest.approx([4.0, 8.0])


async def test_a_swap_waits_for_a_boundary_pauses_the_job_and_stamps_the_steps_after_it():
    manifest, buckets = weights(1)
    async with replaying() as engine:
        loop = asyncio.get_running_loop()
        making = asyncio.create_task(engine.generate(request(0)))
        assert await engine.stage(manifest, buckets) == manifest.digest
        staged = loop.time()
        report = await engine.swap(1)
        swapped = loop.time()
        assert (report.version, report.digest, report.staged_s) == (1, manifest.digest, 3.0)
        trajectory = await making
        # Steps of 0.4 s: version 1 is staged at 3.0, the next step begins at 3.2, the job ends 0.5 s later than it
        # would have.
        assert (staged, swapped, loop.time()) == pytest.approx((3.0, 3.7, 4.5))
        assert trajectory.versions.spans == ((0, 8), (1, 2))


@pytest.mark.parametrize(("takes_turns", "times"), [(False, [3.5, 7.5]), (True, [10.5, 14.5])])
async def test_a_swap_of_an_idle_engine_holds_the_next_job_up(takes_turns, times):
    """Includes, on a shared device, the time to switch to this engine."""
    async with replaying(takes_turns=takes_turns) as engine:
        await engine.stage(*weights(1))
        assert await ends(engine.swap(1), engine.generate(request(0))) == pytest.approx(times)


async def test_engines_draw_the_same_time_for_a_publish():
    first, *others = (replaying(f"rollout-{i}", publish=ServiceTime(fixed_s=3.0, cv=0.5)) for i in range(3))
    async with first as one, others[0] as two, others[1] as three:
        times = await ends(*(engine.stage(*weights(1)) for engine in (one, two, three)))
    assert len(set(times)) == 1 and times[0] != 3.0


async def test_weights_that_did_not_arrive_whole_are_refused():
    manifest, (bucket,) = weights(1)
    bucket[50] ^= 1
    async with replaying() as engine:
        with pytest.raises(EngineError, match=r"rollout-0: .*digest"):
            await engine.stage(manifest, [bucket])
        with pytest.raises(EngineError, match="asked for version 1, staged is None"):
            await engine.swap(1)


async def test_payloads_have_the_profiles_size_differ_between_samples_and_are_the_samples_alone():
    async with replaying() as engine:
        zero, one, again = await asyncio.gather(*(engine.generate(request(i % 2)) for i in range(3)))
    for made in (zero, one):
        assert (made.tensors.nbytes, made.media.nbytes, made.media.dtype) == (5000, 300, np.uint8)
    assert not np.array_equal(zero.tensors, one.tensors) and not np.array_equal(zero.media, one.media)
    assert np.array_equal(zero.tensors, again.tensors) and np.array_equal(zero.media, again.media)
    async with replaying(payload=Payload()) as engine:
        made = await engine.generate(request(0))
        assert (made.tensors.nbytes, made.media.nbytes) == (0, 8), "there is room for the seed"


async def test_jobs_take_random_times_that_depend_on_seed_and_engine_alone():
    random_times = ServiceTime(unit_s=2.0, cv=0.5)

    async def drawn(seed: int) -> list[float]:
        async with replaying(seed=seed, generate=random_times) as engine:
            began = asyncio.get_running_loop().time()
            return [end - began for end in await ends(*(engine.generate(request(i)) for i in range(8)))]

    first = await drawn(1)
    assert await drawn(1) == pytest.approx(first)
    assert await drawn(2) != pytest.approx(first)
    assert first[0] == pytest.approx(random_times.sampler(random.Random("1/rollout-0"))(4))


async def test_closing_fails_what_waits_and_what_runs():
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


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
async def test_closed_before_its_first_step_it_answers_everybody():
    async with replaying() as engine:
        waits = engine.generate(request(0))
        waits.send(None)  # as far as the wait for its result, while the engine's task has not begun
        await engine.close()
        with pytest.raises(EngineError, match="rollout-0 was closed"):
            waits.send(None)


async def test_a_failure_of_the_engine_is_reported_to_waiters_and_to_later_callers():
    def broken(*_: Any, **__: Any) -> float:
        raise OSError("the device fell off the bus")

    async with replaying() as engine:
        engine._device.busy = broken
        with pytest.raises(EngineError, match="OSError: the device fell off the bus"):
            await engine.generate(request(0))
        with pytest.raises(EngineError, match="is not running: OSError: the device fell off the bus"):
            await engine.generate(request(1))


async def test_samples_without_a_waiter_do_not_hold_others_up():
    async with replaying() as engine:
        forsaken = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(1.0)
        forsaken.cancel()
        assert await ends(engine.generate(request(1))) == pytest.approx([8.0])


# ---- one denoising step at a time, and real trajectories -------------------------------------------------------------


async def test_log_probs_are_those_of_a_policy_with_velocity_zero():
    request = make_request(1)
    async with stepping() as engine:
        _, made, *_ = await asyncio.gather(*[engine.generate(make_request(i)) for i in range(6)])
        again = await engine.generate(request)
    assert all(torch.equal(again.tensors[key], made.tensors[key]) for key in ("latents", "log_probs", "means", "final"))
    assert torch.equal(again.media.image, made.media.image)
    x, sigmas, steps = made.tensors["latents"], made.tensors["sigmas"], made.tensors["steps"]
    nowhere, first, rows = torch.zeros_like(x[:-1]), sigmas[1].expand(3), torch.full((3,), request.noise_level)
    expected = transition("flow", x[:-1], nowhere, sigmas[steps], sigmas[steps + 1], first, rows)
    assert_close(made.tensors["log_probs"], log_prob("flow", x[1:], expected.mean, expected.scale), rtol=0, atol=1e-6)
    assert made.media.image.shape == (3, 64, 32)
    assert made.versions.spans == ((0, 6),)


async def test_steps_take_their_time_and_a_sample_joins_what_runs_at_any_of_them_if_it_fits():
    async with stepping(step_s=1.5, per_sample_s=0.5, decode_s=1.0) as engine:
        works = [engine.generate(make_request(0)), engine.generate(make_request(1))]
        # Six steps each, 2 s with two samples, 2.5 s with three; the third joins at 4 s, and decoding takes 1 s each.
        assert await ends(*works, later(2.5, engine.generate(make_request(2)))) == pytest.approx([15.0, 16.0, 20.0])
    began = asyncio.get_running_loop().time()
    async with stepping(step_s=10.0, per_sample_s=1.0) as engine:
        # Two batches of four, six steps of 13 s each.
        times = await ends(*(engine.generate(make_request(i)) for i in range(8)))
        assert [time - began for time in times] == pytest.approx([78.0] * 4 + [156.0] * 4)


async def test_new_weights_take_the_steps_after_the_one_that_is_computed():
    manifest, buckets = weights(7)
    async with stepping(step_s=1.0) as engine:
        running = asyncio.create_task(engine.generate(make_request()))
        await engine.stage(manifest, buckets)
        await asyncio.sleep(2.5)
        report = await engine.swap(7)
        assert (report.version, report.digest) == (7, manifest.digest)
        assert asyncio.get_running_loop().time() == 3.0
        assert (await running).versions.spans == ((0, 3), (7, 3))


async def test_a_wrong_request_fails_by_itself():
    async with stepping() as engine:
        requests = [*(make_request(i, num_inference_steps=i) for i in range(2)), make_request()]
        made = await asyncio.gather(*(engine.generate(one) for one in requests), return_exceptions=True)
    assert [type(one) for one in made] == [ValueError, ValueError, Trajectory]


def test_its_media_have_the_shapes_of_the_spec_and_a_level_of_the_seed():
    class Film(SamplingSpec, frozen=True):
        def media(self) -> tuple[MediaShape, ...]:
            return MediaShape("video", (4, 3, 6, 8), 12), MediaShape("audio", (2, 100), 8000)

    media = [flat_media(seed, Film()) for seed in (1, 1, 2)]
    require_media(media, Film())
    assert torch.equal(media[0].video, media[1].video) and not torch.equal(media[0].video, media[2].video)
    assert torch.equal(media[0].audio, media[1].audio) and not torch.equal(media[0].audio, media[2].audio)
