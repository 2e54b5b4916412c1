"""Tests the production engine against the policy contract and the reference engine. One engine, in a child process,
serves every test here."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.types import Prompt, SampleRequest, SdeWindow
from omni_async.weights.lora import merged_weights
from pipelines.qwen_image.policy import QwenImagePolicy
from tests.fakes import load_model
from tests.rollout.checks import assert_same, check_against_policy
from tests.rollout.conftest import adapters, make_request, new_weights, publish, transformer_with
from tests.rollout.vllm_server import RemoteEngine, running_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def remote(checkpoint: str) -> Iterator[RemoteEngine]:
    with running_engine(checkpoint, dtype="float32", max_batch=8) as (engine, report):
        assert (report.version, report.digest) == (0, "")
        yield engine


@pytest.fixture
def engine(remote: RemoteEngine, policy: QwenImagePolicy) -> Iterator[RemoteEngine]:
    """Provides the engine with the checkpoint's weights, and restores them afterwards."""
    yield remote
    remote("stage", *publish(0, load_model(policy).state_dict()))
    remote("swap", 0)


def reference(policy: QwenImagePolicy, requests: list[SampleRequest], published: Any = None) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        engine = DiffusersEngine("reference", policy, dtype=torch.float32, max_batch=8, device="cpu")
        await engine.start()
        if published is not None:
            await engine.stage(*published)
            await engine.swap(published[0].version)
        made = await asyncio.gather(*[engine.generate(r) for r in requests])
        await engine.close()
        return list(made)

    return asyncio.run(main())


def test_alone_in_a_batch_and_in_the_reference_engine_a_sample_is_the_same(engine, policy):
    """Uses different prompts, lengths, windows, kinds and step counts, guided and not, of two sizes."""
    requests = [make_request(i) for i in range(4)]
    requests += [make_request(4, sde_kind="cps"), make_request(5, sde_kind="dance"), make_request(6, initial_seed=3)]
    requests += [
        make_request(7, num_inference_steps=9),
        make_request(8, window=None, noise_level=0.0, fields=("final",)),
    ]
    requests += [make_request(9, true_cfg_scale=3.0), make_request(10, true_cfg_scale=3.0), make_request(11, width=64)]
    assert engine("is_grad_ready", requests[0])
    batched = engine("generate", requests)
    for request, one, expected in zip(requests, batched, reference(policy, requests), strict=True):
        assert_same(one, expected, 1e-4)
        if request.window is not None:
            check_against_policy(policy, {0: transformer_with(policy, None)}, request, one)
        [alone] = engine("generate", [request])
        assert_same(one, alone, 1e-5)


@pytest.mark.parametrize("payload", ["full", "lora"])
def test_swap_between_two_steps_of_samples_in_flight(engine, policy, payload):
    if payload == "full":
        weights = new_weights(policy, seed=1)
        published = publish(1, weights)
    else:
        pieces = adapters(policy, seed=1)
        weights = dict(merged_weights(load_model(policy).state_dict(), pieces, scale=2.0))
        published = publish(1, pieces, lora={"rank": 2, "alpha": 4.0})
    requests = [make_request(i, num_inference_steps=60, window=SdeWindow(start=2, size=50)) for i in range(3)]
    assert engine("stage", *published) == published[0].digest
    report, mixed = engine("swap_in_flight", requests, 1, 5)
    assert (report.version, report.digest) == (1, published[0].digest)
    models = {0: transformer_with(policy, None), 1: transformer_with(policy, weights)}
    for request, one in zip(requests, mixed, strict=True):
        assert [version for version, _ in one.versions.spans] == [0, 1]
        assert one.versions.spans[0][1] >= 4
        check_against_policy(policy, models, request, one)
    after = [make_request(i) for i in range(3)]
    for one, expected in zip(engine("generate", after), reference(policy, after, published), strict=True):
        assert one.versions.spans == ((1, 6),)
        assert_same(one, expected, 1e-4)


def test_lora_versions_do_not_add_up(engine, policy):
    about = {"rank": 2, "alpha": 4.0}
    for version in (1, 2):
        engine("stage", *publish(version, adapters(policy, seed=version), about))
        engine("swap", version)
    [made] = engine("generate", [make_request()])
    [expected] = reference(policy, [make_request()], publish(2, adapters(policy, seed=2), about))
    assert_same(made, expected, 1e-4)


def test_weights_that_are_not_what_was_published_are_refused(engine, policy):
    weights = new_weights(policy, seed=1)
    manifest, buckets = publish(1, weights)
    broken = [bucket.copy() for bucket in buckets]
    broken[1][5] ^= 1
    with pytest.raises(EngineError, match="digest"):
        engine("stage", manifest, broken)
    with pytest.raises(EngineError, match="staged is None"):
        engine("swap", 1)
    engine("stage", *publish(2, {name: w for name, w in weights.items() if name != "transformer.proj_out.bias"}))
    with pytest.raises(EngineError, match=r"proj_out\.bias"):
        engine("swap", 2)
    [made] = engine("generate", [make_request()])
    check_against_policy(policy, {0: transformer_with(policy, None)}, make_request(), made)


def test_a_failing_worker_call_is_an_error(engine):
    with pytest.raises(EngineError, match="always fails"):
        engine("call", "fail")
    with pytest.raises(EngineError, match="no_such_method"):
        engine("call", "no_such_method")


def test_impossible_requests_fail_alone(engine):
    long = make_request(1, prompt=Prompt(index=1, text="x y " * 1100))
    fine, refused, misfit = engine("generate", [make_request(), long, make_request(2, height=40)])
    assert isinstance(fine, Trajectory)
    assert isinstance(refused, ValueError)
    assert "at most 1024" in str(refused)
    assert isinstance(misfit, ValueError)
