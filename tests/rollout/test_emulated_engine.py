"""Tests the emulated engine in virtual time: one that replays a profile, and one that takes a denoising step at a
time and makes real trajectories."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from omni_async.config.schema import Emulated
from omni_async.families import MediaShape, SamplingSpec
from omni_async.media import require_media
from omni_async.performance.profile import Payload, Profile
from omni_async.performance.service import ServiceTime
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.emulated import EmulatedEngine, RandomPayload, ReplayedTimes, StepTimes
from omni_async.rollout.stepping import ZeroVelocity, flat_media
from omni_async.sde.transitions import log_prob, transition
from omni_async.simulation.virtual_time import run
from omni_async.types import Piece, Prompt, SampleRequest, SdeWindow, TensorSpec, WeightManifest
from omni_async.weights.snapshot import Snapshot
from pipelines.qwen_image.sampling import QwenImageSampling
from tests.rollout.conftest import make_request

T = TypeVar("T")
STEPS = 10
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


def request(number: int) -> SampleRequest:
    return SampleRequest(
        sample_id=f"g0.s{number}",
        kind="train",
        group=0,
        sample=number,
        prompt=Prompt(0, "a cat"),
        seed=number * 1_000_003,
        spec=QwenImageSampling(height=32, width=32),
        num_inference_steps=STEPS,
        noise_level=0.7,
        sde_kind="flow",
        window=SdeWindow(0, 2),
    )


def weights(version: int) -> tuple[WeightManifest, list[np.ndarray]]:
    bucket = np.full(100, version, np.uint8)
    snapshot = Snapshot(version, "full", (TensorSpec("bucket.0", "uint8", (100,), (Piece(0, 0, 100),)),), [bucket])
    return snapshot.manifest(), [bucket]


def replaying(
    profile: Profile = PROFILE, name: str = "rollout-0", seed: int = 1, takes_turns: bool = False
) -> EmulatedEngine:
    """Builds an engine of at most four samples a job."""
    times = ReplayedTimes(name, profile, seed, max_batch=4, takes_turns=takes_turns)
    return EmulatedEngine(name, times, RandomPayload(profile.payload, seed), max_batch=4)


def stepping(max_batch: int = 4, **times: float) -> EmulatedEngine:
    make = ZeroVelocity(lambda spec: (spec.height * spec.width // 256, 8))
    return EmulatedEngine("engine", StepTimes(Emulated(**({"step_s": 0.0} | times))), make, max_batch=max_batch)


def play(
    work: Any, profile: Profile = PROFILE, *, engine: Callable[[], EmulatedEngine] | None = None, **more: Any
) -> Any:
    """Runs `work(engine)` on a started engine, and closes it afterwards."""

    async def main() -> Any:
        made = engine() if engine else replaying(profile, **more)
        report = await made.start()
        assert (report.engine, report.version, report.digest) == (made.name, 0, "")
        try:
            return await work(made)
        finally:
            await made.close()

    return run(main())


async def ends(*works: Coroutine[Any, Any, Any]) -> list[float]:
    """Returns the time when each of them was done."""

    async def end(work: Coroutine[Any, Any, Any]) -> float:
        await work
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(end(work) for work in works)))


def test_a_job_is_a_batch_of_what_waits_and_jobs_follow_one_another() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        return await ends(*(engine.generate(request(i)) for i in range(9)))

    # Two full batches of 2 + 4 x 2 s, and one sample in 2 + 2 s.
    assert play(work) == pytest.approx([10.0] * 4 + [20.0] * 4 + [24.0])


def test_a_sample_that_comes_while_a_job_runs_waits_for_the_next() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        async def late() -> None:
            await asyncio.sleep(1.0)
            await engine.generate(request(1))

        return await ends(engine.generate(request(0)), late())

    assert play(work) == pytest.approx([4.0, 8.0])


def test_samples_a_message_apart_are_one_batch_and_the_device_does_not_wait_for_them() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        async def soon() -> None:
            await asyncio.sleep(0.004)
            await engine.generate(request(1))

        return await ends(engine.generate(request(0)), soon())

    assert play(work) == pytest.approx([6.0, 6.0])


def test_a_swap_waits_for_a_boundary_pauses_the_job_and_stamps_the_steps_after_it() -> None:
    async def work(engine: EmulatedEngine) -> tuple[Trajectory, float, float, float]:
        loop = asyncio.get_running_loop()
        manifest, buckets = weights(1)
        making = asyncio.create_task(engine.generate(request(0)))
        assert await engine.stage(manifest, buckets) == manifest.digest
        staged = loop.time()
        report = await engine.swap(1)
        swapped = loop.time()
        assert (report.version, report.digest, report.staged_s) == (1, manifest.digest, 3.0)
        return await making, staged, swapped, loop.time()

    trajectory, staged, swapped, made = play(work)
    # Steps of 0.4 s: version 1 is staged at 3.0, the next step begins at 3.2, the job ends 0.5 s later than it would
    # have.
    assert (staged, swapped, made) == pytest.approx((3.0, 3.7, 4.5))
    assert trajectory.versions.spans == ((0, 8), (1, 2))


def test_a_swap_of_an_idle_engine_holds_the_next_job_up() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        await engine.stage(*weights(1))
        return await ends(engine.swap(1), engine.generate(request(0)))

    assert play(work) == pytest.approx([3.5, 7.5])
    assert play(work, takes_turns=True) == pytest.approx([10.5, 14.5]), (
        "and on a shared device includes the time to switch to this engine"
    )


def test_engines_draw_the_same_time_for_a_publish() -> None:
    profile = msgspec.structs.replace(PROFILE, publish=ServiceTime(fixed_s=3.0, cv=0.5))

    async def main() -> list[float]:
        engines = [replaying(profile, f"rollout-{i}") for i in range(3)]
        for engine in engines:
            await engine.start()
        times = await ends(*(engine.stage(*weights(1)) for engine in engines))
        for engine in engines:
            await engine.close()
        return times

    first, *others = run(main())
    assert others == [first, first] and first != 3.0


def test_weights_that_did_not_arrive_whole_are_refused() -> None:
    async def work(engine: EmulatedEngine) -> None:
        manifest, buckets = weights(1)
        damaged = buckets[0].copy()
        damaged[50] ^= 1
        with pytest.raises(EngineError, match=r"rollout-0: .*digest"):
            await engine.stage(manifest, [damaged])
        with pytest.raises(EngineError, match="asked for version 1, staged is None"):
            await engine.swap(1)

    play(work)


def test_payloads_have_the_profiles_size_differ_between_samples_and_are_the_samples_alone() -> None:
    async def work(engine: EmulatedEngine) -> list[Trajectory]:
        return list(await asyncio.gather(*(engine.generate(request(i % 2)) for i in range(3))))

    zero, one, again = play(work)
    for made in (zero, one):
        assert (made.tensors.nbytes, made.media.nbytes, made.media.dtype) == (5000, 300, np.uint8)
    assert not np.array_equal(zero.tensors, one.tensors) and not np.array_equal(zero.media, one.media)
    assert np.array_equal(zero.tensors, again.tensors) and np.array_equal(zero.media, again.media)


def test_without_a_payload_there_is_room_for_the_seed() -> None:
    async def work(engine: EmulatedEngine) -> Trajectory:
        return await engine.generate(request(0))

    made = play(work, msgspec.structs.replace(PROFILE, payload=Payload()))
    assert (made.tensors.nbytes, made.media.nbytes) == (0, 8)


def test_jobs_take_random_times_that_depend_on_seed_and_engine_alone() -> None:
    profile = msgspec.structs.replace(PROFILE, generate=ServiceTime(unit_s=2.0, cv=0.5))

    async def work(engine: EmulatedEngine) -> list[float]:
        return await ends(*(engine.generate(request(i)) for i in range(8)))

    assert play(work, profile) == play(work, profile)
    assert play(work, profile) != play(work, profile, seed=2)
    expected = random.Random("1/rollout-0")
    assert play(work, profile)[0] == pytest.approx(profile.generate.sample(expected, 4))


def test_closing_fails_what_waits_and_what_runs() -> None:
    async def work(engine: EmulatedEngine) -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(request(i))) for i in range(6)]
        await engine.stage(*weights(1))
        tasks.append(asyncio.create_task(engine.swap(1)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(request(9))
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(outcome) for outcome in play(work)] == [EngineError] * 7


def test_a_failure_of_the_engine_is_reported_to_waiters_and_to_later_callers() -> None:
    async def work(engine: EmulatedEngine) -> list[str]:
        def broken(*_: Any, **__: Any) -> float:
            raise OSError("the device fell off the bus")

        engine._device.busy = broken  # type: ignore[method-assign]
        said = []
        for number in (0, 1):
            with pytest.raises(EngineError) as caught:
                await engine.generate(request(number))
            said.append(str(caught.value))
        return said

    waits, asks = play(work)
    assert waits.endswith("OSError: the device fell off the bus")
    assert asks.endswith("is not running: OSError: the device fell off the bus")


def test_samples_without_a_waiter_do_not_hold_others_up() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        forsaken = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(1.0)
        forsaken.cancel()
        return await ends(engine.generate(request(1)))

    assert play(work) == pytest.approx([8.0])


# ---- one denoising step at a time, and real trajectories -------------------------------------------------------------


def test_log_probs_are_those_of_a_policy_with_velocity_zero() -> None:
    async def work(engine: EmulatedEngine) -> Trajectory:
        made = await asyncio.gather(*[engine.generate(make_request(i)) for i in range(6)])
        again = await engine.generate(make_request(1))
        for key in ("latents", "log_probs", "means", "final"):
            assert torch.equal(again.tensors[key], made[1].tensors[key])
        assert torch.equal(again.media.image, made[1].media.image)
        return made[1]

    made, request = play(work, engine=stepping), make_request(1)
    x, sigmas, steps = made.tensors["latents"], made.tensors["sigmas"], made.tensors["steps"]
    rows = torch.full((3,), request.noise_level)
    expected = transition(
        "flow", x[:-1], torch.zeros_like(x[:-1]), sigmas[steps], sigmas[steps + 1], sigmas[1].expand(3), rows
    )
    assert_close(made.tensors["log_probs"], log_prob("flow", x[1:], expected.mean, expected.scale), rtol=0, atol=1e-6)
    assert made.media.image.shape == (3, 64, 32)
    assert made.versions.spans == ((0, 6),)


def test_steps_take_their_time_and_a_sample_joins_what_runs_at_any_of_them() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        async def late() -> None:
            await asyncio.sleep(2.5)
            await engine.generate(make_request(2))

        return await ends(*(engine.generate(make_request(i)) for i in range(2)), late())

    # Six steps each, 2 s with two samples, 2.5 s with three; the third joins at 4 s and decoding takes 1 s a sample.
    times = play(work, engine=lambda: stepping(step_s=1.5, per_sample_s=0.5, decode_s=1.0))
    assert times == pytest.approx([15.0, 16.0, 20.0])


def test_no_more_samples_run_than_fit() -> None:
    async def work(engine: EmulatedEngine) -> list[float]:
        return await ends(*(engine.generate(make_request(i)) for i in range(8)))

    # Two batches of four, six steps of 13 s each.
    assert play(work, engine=lambda: stepping(step_s=10.0, per_sample_s=1.0)) == pytest.approx([78.0] * 4 + [156.0] * 4)


def test_new_weights_take_the_steps_after_the_one_that_is_computed() -> None:
    async def work(engine: EmulatedEngine) -> Trajectory:
        running = asyncio.create_task(engine.generate(make_request()))
        manifest, buckets = weights(7)
        await engine.stage(manifest, buckets)
        await asyncio.sleep(2.5)
        report = await engine.swap(7)
        assert (report.version, report.digest) == (7, manifest.digest)
        assert asyncio.get_running_loop().time() == 3.0
        return await running

    assert play(work, engine=lambda: stepping(step_s=1.0)).versions.spans == ((0, 3), (7, 3))


def test_a_wrong_request_fails_by_itself() -> None:
    async def work(engine: EmulatedEngine) -> list[Any]:
        wrong = [msgspec.structs.replace(make_request(i), num_inference_steps=i) for i in range(2)]
        return await asyncio.gather(*(engine.generate(one) for one in [*wrong, make_request()]), return_exceptions=True)

    assert [type(one) for one in play(work, engine=stepping)] == [ValueError, ValueError, Trajectory]


def test_its_media_have_the_shapes_of_the_spec_and_a_level_of_the_seed():
    class Film(SamplingSpec, frozen=True):
        def media(self) -> tuple[MediaShape, ...]:
            return MediaShape("video", (4, 3, 6, 8), 12), MediaShape("audio", (2, 100), 8000)

    media = [flat_media(seed, Film()) for seed in (1, 1, 2)]
    require_media(media, Film())
    assert torch.equal(media[0].video, media[1].video) and not torch.equal(media[0].video, media[2].video)
    assert torch.equal(media[0].audio, media[1].audio) and not torch.equal(media[0].audio, media[2].audio)
