import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import torch
from diffusers import QwenImagePipeline
from torch.testing import assert_close

from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.sde.noise import initial_noise
from omni_async.types import Prompt, SampleRequest
from omni_async.weights.lora import merged_weights
from pipelines.qwen_image.policy import QwenImagePolicy
from tests.fakes import load_model
from tests.rollout.conftest import (
    adapters,
    assert_same,
    check_against_policy,
    damaged,
    make_request,
    new_weights,
    publish,
    transformer_with,
)

T = TypeVar("T")


def with_engine(policy: QwenImagePolicy, use: Callable[[DiffusersEngine], Awaitable[T]], **options: Any) -> T:
    async def main() -> T:
        engine = DiffusersEngine(
            "engine", policy, **({"dtype": torch.float32, "max_batch": 4, "device": "cpu"} | options)
        )
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def together(engine: DiffusersEngine, requests: list[SampleRequest]) -> list[Trajectory]:
    return list(await asyncio.gather(*[engine.generate(r) for r in requests]))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_alone_or_in_a_batch_a_sample_is_the_same(policy, scale):
    requests = [make_request(i, true_cfg_scale=scale) for i in range(4)]
    batched = with_engine(policy, lambda e: together(e, requests))
    alone = with_engine(policy, lambda e: together(e, requests), max_batch=1)
    for one, other in zip(batched, alone, strict=True):
        assert_same(one, other, 1e-5)


def test_trajectories_agree_with_the_policy_contract(policy):
    requests = [make_request(i, sde_kind=kind) for i, kind in enumerate(("flow", "cps", "dance"))]
    requests.append(make_request(3, true_cfg_scale=3.0))
    made = with_engine(policy, lambda e: together(e, requests))
    for request, one in zip(requests, made, strict=True):
        check_against_policy(policy, {0: transformer_with(policy, None)}, request, one)
        assert one.media.image.shape == (3, 64, 32)
        assert one.media.image.dtype == torch.uint8


def test_ode_sample_is_the_image_of_diffusers_own_pipeline(policy, checkpoint):
    request = make_request(window=None, noise_level=0.0, true_cfg_scale=2.5, fields=("final", "latents", "log_probs"))
    [made] = with_engine(policy, lambda e: together(e, [request]))
    assert made.tensors["log_probs"].shape == (0,)
    pipeline = QwenImagePipeline.from_pretrained(checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    options = {
        "prompt": request.prompt.text,
        "negative_prompt": request.spec.negative_prompt,
        "true_cfg_scale": request.spec.true_cfg_scale,
        "height": request.spec.height,
        "width": request.spec.width,
        "num_inference_steps": request.num_inference_steps,
        "latents": initial_noise(request.seed, policy.latent_shape(request.spec))[None],
    }
    assert_close(made.tensors["final"], pipeline(output_type="latent", **options).images[0], rtol=0, atol=1e-5)
    expected = torch.from_numpy((pipeline(output_type="np", **options).images[0] * 255).round()).permute(2, 0, 1)
    assert (made.media.image - expected).abs().max() <= 1


def test_only_the_requested_fields_come_back(policy):
    [made] = with_engine(policy, lambda e: together(e, [make_request(fields=("final",))]))
    assert set(made.tensors.keys()) == {"final", "sigmas", "steps"}


def test_batches_depend_on_call_order_alone(policy):
    """Makes five calls in one tick: the first four that fit together, then the odd size, then the rest."""
    batches: list[list[int]] = []

    class Watched(QwenImagePolicy):
        def velocity(self, transformer: Any, latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            batches.append(list(latents.shape[:2]))
            return super().velocity(transformer, latents, *args, **kwargs)

    requests = [make_request(i, width=64 if i == 1 else 32) for i in range(6)]
    with_engine(Watched(policy.path), lambda e: together(e, requests))
    assert batches == [[4, 8]] * 6 + [[1, 16]] * 6 + [[1, 8]] * 6


class Pausing(QwenImagePolicy):
    """A policy that stops before the velocity number `at` until it may go on."""

    at = 3

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.calls = 0
        self.reached, self.go_on = threading.Event(), threading.Event()

    def velocity(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.calls == self.at:
            self.reached.set()
            assert self.go_on.wait(60)
        self.calls += 1
        return super().velocity(*args, **kwargs)


@pytest.mark.parametrize("payload", ["full", "lora"])
def test_swap_between_two_steps_of_samples_in_flight(policy, payload):
    if payload == "full":
        weights = new_weights(policy, seed=1)
        published = publish(1, weights)
    else:
        base, pieces = load_model(policy).state_dict(), adapters(policy, seed=1)
        weights = dict(merged_weights(base, pieces, scale=2.0))
        published = publish(1, pieces, lora={"rank": 2, "alpha": 4.0})
    pausing = Pausing(policy.path)
    requests = [make_request(i) for i in range(3)]

    async def use(engine: DiffusersEngine) -> tuple[list[Trajectory], list[Trajectory]]:
        running = asyncio.gather(*[engine.generate(r) for r in requests])
        await asyncio.to_thread(pausing.reached.wait, 60)
        assert await engine.stage(*published) == published[0].digest
        swapping = asyncio.create_task(engine.swap(1))
        await asyncio.sleep(0)
        pausing.go_on.set()
        report = await swapping
        assert (report.version, report.digest) == (1, published[0].digest)
        return list(await running), await together(engine, requests)

    mixed, after = with_engine(pausing, use)
    models = {0: transformer_with(policy, None), 1: transformer_with(policy, weights)}
    for request, one in zip(requests, mixed, strict=True):
        assert one.versions.spans == ((0, 4), (1, 2))
        check_against_policy(policy, models, request, one)
    for request, one in zip(requests, after, strict=True):
        assert one.versions.spans == ((1, 6),)
        check_against_policy(policy, models, request, one)


def test_in_request_batching_a_swap_waits_for_the_end_of_the_batch(policy):
    pausing = Pausing(policy.path)
    published = publish(1, new_weights(policy, seed=1))
    requests = [make_request(i) for i in range(6)]  # a batch of four, and one of two

    async def use(engine: DiffusersEngine) -> list[Trajectory]:
        running = asyncio.gather(*[engine.generate(r) for r in requests])
        await asyncio.to_thread(pausing.reached.wait, 60)
        await engine.stage(*published)
        swapping = asyncio.create_task(engine.swap(1))
        await asyncio.sleep(0)
        pausing.go_on.set()
        await swapping
        return list(await running)

    made = with_engine(pausing, use, batching="request")
    assert [one.versions.spans for one in made] == [((0, 6),)] * 4 + [((1, 6),)] * 2


def test_lora_versions_do_not_add_up(policy):
    request, about = make_request(), {"rank": 2, "alpha": 4.0}
    first, second = (publish(v, adapters(policy, seed=v), about) for v in (1, 2))

    async def through(engine: DiffusersEngine, *versions: Any) -> Trajectory:
        for published in versions:
            await engine.stage(*published)
            await engine.swap(published[0].version)
        return await engine.generate(request)

    both = with_engine(policy, lambda e: through(e, first, second))
    assert_same(both, with_engine(policy, lambda e: through(e, second)), 0.0)


def test_weights_that_are_not_what_was_published_are_refused(policy):
    weights = new_weights(policy, seed=1)
    incomplete = publish(2, {name: w for name, w in weights.items() if name != "transformer.proj_out.bias"})

    async def use(engine: DiffusersEngine) -> None:
        with pytest.raises(EngineError, match="digest"):
            await engine.stage(*damaged(publish(1, weights)))
        with pytest.raises(EngineError, match="staged is None"):
            await engine.swap(1)
        await engine.stage(*incomplete)
        with pytest.raises(EngineError, match=r"proj_out\.bias"):
            await engine.swap(2)
        made = await engine.generate(make_request())
        assert made.versions.spans == ((0, 6),)
        check_against_policy(policy, {0: transformer_with(policy, None)}, make_request(), made)

    with_engine(policy, use)


def test_a_prompt_that_cannot_be_encoded_fails_alone(policy):
    long = make_request(1, prompt=Prompt(index=1, text="x y " * 1100))

    async def use(engine: DiffusersEngine) -> list[Any]:
        return await asyncio.gather(engine.generate(make_request()), engine.generate(long), return_exceptions=True)

    fine, refused = with_engine(policy, use)
    assert isinstance(fine, Trajectory)
    assert isinstance(refused, ValueError)
    assert "at most 1024" in str(refused)


def test_close_fails_what_is_in_flight_and_what_waits(policy):
    pausing = Pausing(policy.path)

    async def use(engine: DiffusersEngine) -> list[Any]:
        running = asyncio.gather(*[engine.generate(make_request(i)) for i in range(2)], return_exceptions=True)
        await asyncio.to_thread(pausing.reached.wait, 60)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        pausing.go_on.set()
        await closing
        return list(await running)

    results = with_engine(pausing, use, max_batch=1)
    assert [type(r) for r in results] == [EngineError, EngineError]


def test_cancelled_callers_do_not_disturb_the_others(policy):
    async def use(engine: DiffusersEngine) -> Trajectory:
        tasks = [asyncio.create_task(engine.generate(make_request(i))) for i in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        return await tasks[1]

    assert_same(with_engine(policy, use), with_engine(policy, lambda e: e.generate(make_request(1))), 1e-5)


@pytest.mark.gpu
def test_runs_in_bfloat16_on_an_accelerator(policy):
    requests = [make_request(i) for i in range(3)]
    made = with_engine(policy, lambda e: together(e, requests), dtype=torch.bfloat16, device=None)
    for request, one in zip(requests, made, strict=True):
        assert all(t.device.type == "cpu" for t in one.tensors.flatten_keys().values())
        assert one.tensors["latents"].dtype == torch.float32
        check_against_policy(policy, {0: transformer_with(policy, None)}, request, one, tolerance=5e-2)
