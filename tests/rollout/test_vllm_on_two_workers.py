"""Tests a model that vLLM splits over two workers: broadcast versions, and a vLLM that dies in a swap."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from omni_async_pipelines.qwen_omni.tiny import build

pytest.importorskip("vllm")

from omni_async.rollout.base import EngineError
from omni_async.rollout.vllm_engine import VllmEngine
from omni_async.weights.lora import merged_weights
from omni_async.weights.transport.base import receive, sending
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender
from tests.rollout.conftest import Published, publish
from tests.rollout.test_vllm_engine import BOUND, CONTEXT, FAMILY, SPEC, TalkativeThinker, asked, swapping, together
from tests.rollout.test_vllm_engine import __name__ as policies
from tests.rollout.token_answers import check_answer, continued, trained, versions, whole
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]

REQUESTS = asked(5, msgspec.structs.replace(SPEC, max_tokens=24))  # workers wait for each other without sleep


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def processes() -> dict[str, psutil.Process]:
    """Returns vLLM's, by name."""
    found = psutil.Process().children(recursive=True)
    return {one.cmdline()[0]: one for one in found if one.cmdline()[:1] and one.cmdline()[0].startswith("VLLM::")}


def test_a_split_model_gets_its_versions_and_dies_with_one_line(environment: None, tmp_path: Path) -> None:
    asyncio.run(_split(str(build(tmp_path / "tiny"))))  # the recipe's has three heads


async def _split(path: str) -> None:
    family = msgspec.structs.replace(FAMILY, policy=f"{policies}:TalkativeThinker")
    policy = TalkativeThinker(path)
    models = dict(versions(policy, 3, scale=0.05))
    options = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": CONTEXT}
    engine = VllmEngine("engine", family, path=path, dtype="float32", max_batch=8, devices=2, engine_args=options)
    sender, receiver = CollectiveSender("127.0.0.1", "cpu", PATIENCE), CollectiveReceiver("engine", PATIENCE)

    async def carry(published: Published) -> None:
        async with sending(sender, *published) as transfer:
            assert await engine.stage(*await receive(receiver, published[0], transfer)) == published[0].digest
            await engine.swap(published[0].version)

    async def check(made: list[Any], version: int) -> None:
        for request, one in zip(REQUESTS, made, strict=True):
            assert {*one.versions} == {version}
            check_answer(policy, request, one, whole(policy, models, request, one), BOUND)

    try:
        await engine.start()
        assert len([name for name in processes() if "Worker" in name]) == 2
        await check(await together(engine, REQUESTS), 0)
        await sender.init({"engine": receiver.init})
        full = publish(1, trained(policy, models[1]))
        for request, one in zip(REQUESTS, await swapping(engine, REQUESTS, (8, carry(full))), strict=True):
            check_answer(policy, request, one, continued(policy, models, request, one), BOUND)
        await check(await together(engine, REQUESTS), 1)

        base, generator = trained(policy, models[0]), torch.Generator().manual_seed(1)
        adapters = {}
        for name in [name for name in base if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight"))]:
            module, (rows, columns) = name.removesuffix(".weight"), base[name].shape
            adapters[f"{module}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            adapters[f"{module}.lora_B.weight"] = 0.02 * torch.randn(rows, 2, generator=generator)
        models[2] = policy.load_components(torch.float32)
        for name, weight in merged_weights(base, adapters, scale=2.0):
            trained(policy, models[2])[name].copy_(weight)
        await carry(publish(2, adapters, lora={"rank": 2, "alpha": 4.0}))
        await check(await together(engine, REQUESTS), 2)

        worker = next(one for name, one in processes().items() if "Worker" in name)
        worker.suspend()  # it never answers the swap
        dying = asyncio.create_task(carry(publish(3, trained(policy, models[1]))))
        while engine._resumed.is_set() and not dying.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        processes()["VLLM::EngineCore"].kill()
        worker.kill()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineError, match=r"^engine: (pause|swap_version): vLLM died before it answered$"):
                await dying
        with pytest.raises(EngineError, match="version 3 could not be loaded"):
            await engine.generate(REQUESTS[0])
    finally:
        await engine.close()
