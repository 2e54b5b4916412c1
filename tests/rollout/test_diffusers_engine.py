import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy

from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.types import Prompt, SampleRequest
from omni_async.weights.lora import merged_weights
from tests.rollout.conftest import (
    adapters,
    assert_same,
    check_against_policy,
    make_request,
    new_weights,
    publish,
    transformer_with,
)
from tests.support.fakes import load_model
from tests.support.patience import PATIENCE


@asynccontextmanager
async def running(policy: QwenImagePolicy, **options: Any) -> AsyncIterator[DiffusersEngine]:
    engine = DiffusersEngine("engine", policy, **({"dtype": torch.float32, "max_batch": 4, "device": "cpu"} | options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def together(engine: DiffusersEngine, requests: list[SampleRequest]) -> list[Trajectory]:
    return list(await asyncio.gather(*[engine.generate(r) for r in requests]))


async def drawn(policy: QwenImagePolicy, requests: list[SampleRequest], **options: Any) -> list[Trajectory]:
    async with running(policy, **options) as engine:
        return await together(engine, requests)


async def test_trajectories_agree_with_the_policy(policy):
    requests = [make_request(i, sde_kind=kind) for i, kind in enumerate(("flow", "cps", "dance"))]
    requests.append(make_request(3, true_cfg_scale=3.0))
    [final] = await drawn(policy, [make_request(fields=("final",))])
    assert set(final.tensors.keys()) == {"final", "sigmas", "steps"}
    for request, one in zip(requests, await drawn(policy, requests), strict=True):
        check_against_policy(policy, {0: transformer_with(policy, None)}, request, one)
        assert one.media.image.shape == (3, 64, 32) and one.media.image.dtype == torch.uint8


async def test_batches_of_calls(policy):
    """Six calls in one tick: the first four that fit together, then the odd size, then the rest."""
    batches: list[list[int]] = []

    class Watched(QwenImagePolicy):
        def velocity(self, transformer: Any, latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            batches.append(list(latents.shape[:2]))
            return super().velocity(transformer, latents, *args, **kwargs)

    await drawn(Watched(policy.path), [make_request(i, width=64 if i == 1 else 32) for i in range(6)])
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
            assert self.go_on.wait(PATIENCE)
        self.calls += 1
        return super().velocity(*args, **kwargs)

    async def while_paused(self, meanwhile: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.to_thread(self.reached.wait, 60)
        task = asyncio.create_task(meanwhile)
        await asyncio.sleep(0)
        self.go_on.set()
        return await task


def weights_and_version(policy: QwenImagePolicy, version: int, payload: str) -> tuple[dict[str, torch.Tensor], Any]:
    if payload == "full":
        weights = new_weights(policy, seed=version)
        return weights, publish(version, weights)
    pieces = adapters(policy, seed=version)
    merged = dict(merged_weights(load_model(policy).state_dict(), pieces, scale=2.0))
    return merged, publish(version, pieces, lora={"rank": 2, "alpha": 4.0})


@pytest.mark.parametrize("payload", ["full", "lora"])
@pytest.mark.parametrize("device", ["cpu", pytest.param(None, marks=pytest.mark.gpu)])
async def test_swap_between_two_steps(policy, device, payload):
    (first, one), (second, other) = (weights_and_version(policy, version, payload) for version in (1, 2))
    pausing, requests = Pausing(policy.path), [make_request(i) for i in range(3)]
    async with running(pausing, device=device) as engine:
        in_flight = asyncio.create_task(together(engine, requests))
        assert await engine.stage(*one) == one[0].digest
        report = await pausing.while_paused(engine.swap(1))
        assert (report.version, report.digest) == (1, one[0].digest)
        mixed = await in_flight
        await engine.stage(*other)
        await engine.swap(2)
        after = await together(engine, requests)
    models = dict(enumerate(transformer_with(policy, weights) for weights in (None, first, second)))
    for made, spans in ((mixed, ((0, 4), (1, 2))), (after, ((2, 6),))):
        for request, sample in zip(requests, made, strict=True):
            assert sample.versions.spans == spans
            check_against_policy(policy, models, request, sample, tolerance=1e-5 if device == "cpu" else 1e-4)


async def test_close_fails_all_samples(policy):
    pausing = Pausing(policy.path)
    async with running(pausing, max_batch=1) as engine:
        in_flight = asyncio.gather(*[engine.generate(make_request(i)) for i in range(2)], return_exceptions=True)
        await pausing.while_paused(engine.close())
        assert [type(outcome) for outcome in await in_flight] == [EngineError, EngineError]


async def test_cancelled_callers_do_not_disturb_others(policy):
    async with running(policy) as engine:
        tasks = [asyncio.create_task(engine.generate(make_request(i))) for i in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        assert_same(await tasks[1], await engine.generate(make_request(1)), 1e-5)


async def test_request_batching_swaps_after_the_batch(policy):
    pausing = Pausing(policy.path)
    async with running(pausing, batching="request") as engine:
        in_flight = asyncio.create_task(together(engine, [make_request(i) for i in range(6)]))  # four, and then two
        await engine.stage(*publish(1, new_weights(policy, seed=1)))
        await pausing.while_paused(engine.swap(1))
        assert [one.versions.spans for one in await in_flight] == [((0, 6),)] * 4 + [((1, 6),)] * 2


async def test_unusable_prompts_fail_alone(policy):
    class Broken(QwenImagePolicy):
        def velocity(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise ZeroDivisionError("no velocity")

    requests = [make_request(), make_request(1, prompt=Prompt(index=1, text="x y " * 1100))]
    async with running(policy) as engine:
        fine, refused = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert isinstance(fine, Trajectory)
    assert isinstance(refused, ValueError) and "at most 1024" in str(refused)
    with pytest.raises(EngineError, match="engine: ZeroDivisionError: no velocity"):
        await drawn(Broken(policy.path), [make_request()])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
async def test_runs_on_an_accelerator_and_agrees_with_the_cpu(policy, dtype, tolerance):
    requests = [*(make_request(i) for i in range(2)), make_request(2, true_cfg_scale=3.0)]
    made = await drawn(policy, requests, dtype=dtype, device=None)
    for request, one in zip(requests, made, strict=True):
        assert all(t.device.type == "cpu" for t in one.tensors.flatten_keys().values())
        assert one.tensors["latents"].dtype == torch.float32
        check_against_policy(policy, {0: transformer_with(policy, None)}, request, one, tolerance)


@pytest.mark.gpu
async def test_on_an_accelerator_encoders_and_the_base_of_adapters_lie_in_host_memory(policy):
    requests = [make_request(i) for i in range(3)]
    plain = await drawn(policy, requests, device=None)
    async with running(policy, device=None, offload=True) as engine:
        for one, other in zip(plain, await together(engine, requests), strict=True):
            assert_same(one, other, 1e-5)
        held = [*engine._codec.encoders[0].parameters()]  # type: ignore[attr-defined]
        await engine.stage(*publish(1, adapters(policy, seed=1), lora={"rank": 2, "alpha": 4.0}))
        await engine.swap(1)
        assert {tensor.device.type for tensor in (*held, *engine._base.values())} == {"cpu"}
        assert all(tensor.is_pinned() for tensor in held)
