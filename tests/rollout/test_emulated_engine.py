import asyncio
import time

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from omni_async.config.schema import Emulated
from omni_async.families import MediaShape, SamplingSpec
from omni_async.media import require_media
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.emulated import EmulatedEngine, flat_media
from omni_async.sde.transitions import log_prob, transition
from tests.packing import pack
from tests.rollout.conftest import make_request


def engine(max_batch: int = 4, **times: float) -> EmulatedEngine:
    return EmulatedEngine(
        "engine",
        Emulated(**({"step_s": 0.0} | times)),
        max_batch=max_batch,
        latent_shape=lambda spec: (spec.height * spec.width // 256, 8),
    )


def test_log_probs_are_those_of_a_policy_with_velocity_zero():
    async def main() -> Trajectory:
        e = engine()
        await e.start()
        made = await asyncio.gather(*[e.generate(make_request(i)) for i in range(6)])
        again = await e.generate(make_request(1))
        await e.close()
        for key in ("latents", "log_probs", "means", "final"):
            assert torch.equal(again.tensors[key], made[1].tensors[key])
        assert torch.equal(again.media.image, made[1].media.image)
        return made[1]

    made = asyncio.run(main())
    t, request = made.tensors, make_request(1)
    x, sigmas = t["latents"], t["sigmas"]
    steps = t["steps"]
    rows = torch.full((3,), request.noise_level)
    expected = transition(
        "flow", x[:-1], torch.zeros_like(x[:-1]), sigmas[steps], sigmas[steps + 1], sigmas[1].expand(3), rows
    )
    assert_close(t["log_probs"], log_prob("flow", x[1:], expected.mean, expected.scale), rtol=0, atol=1e-6)
    assert made.media.image.shape == (3, 64, 32)
    assert made.versions.spans == ((0, 6),)


def test_steps_take_their_time_and_batches_share_it():
    async def main() -> float:
        e = engine(max_batch=4, step_s=0.01, per_sample_s=0.001)
        await e.start()
        started = time.perf_counter()
        await asyncio.gather(*[e.generate(make_request(i)) for i in range(8)])
        took = time.perf_counter() - started
        await e.close()
        return took

    # Two batches of four, six steps of 13 ms each.
    assert 0.156 <= asyncio.run(main()) < 0.6


def test_versions_change_between_two_steps():
    async def main() -> Trajectory:
        e = engine(step_s=0.02)
        await e.start()
        manifest, buckets = pack([("w", torch.ones(3))], version=7, payload="full", bucket_bytes=100)
        running = asyncio.create_task(e.generate(make_request()))
        await e.stage(manifest, buckets)
        while not (e._running and e._running[0][0].step >= 2):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        report = await e.swap(7)
        assert (report.version, report.digest) == (7, manifest.digest)
        made = await running
        with pytest.raises(EngineError, match="digest"):
            await e.stage(manifest, [np.zeros_like(bucket) for bucket in buckets])
        await e.close()
        return made

    assert asyncio.run(main()).versions.spans == ((0, 2), (7, 4))


def test_close_fails_what_is_in_flight():
    async def main() -> list[object]:
        e = engine(max_batch=1, step_s=10.0)
        await e.start()
        running = asyncio.gather(*[e.generate(make_request(i)) for i in range(2)], return_exceptions=True)
        await asyncio.sleep(0.01)
        await e.close()
        return list(await running)

    assert [type(r) for r in asyncio.run(main())] == [EngineError, EngineError]


def test_its_media_have_the_shapes_of_the_spec_and_a_level_of_the_seed():
    class Film(SamplingSpec, frozen=True):
        def media(self) -> tuple[MediaShape, ...]:
            return MediaShape("video", (4, 3, 6, 8), 12), MediaShape("audio", (2, 100), 8000)

    media = [flat_media(seed, Film()) for seed in (1, 1, 2)]
    require_media(media, Film())
    assert torch.equal(media[0].video, media[1].video) and not torch.equal(media[0].video, media[2].video)
    assert torch.equal(media[0].audio, media[1].audio) and not torch.equal(media[0].audio, media[2].audio)
