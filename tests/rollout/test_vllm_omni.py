"""Tests a real vLLM-Omni, in child processes: Qwen-Image against the reference engine, and request batching against
step-wise batching. `tests/pipelines/test_parity.py` compares every family."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm_omni") is None:  # its import takes seconds in each process that collects this file
    pytest.skip("vllm_omni is not installed", allow_module_level=True)

from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.types import Prompt, SampleRequest, SdeWindow
from omni_async.weights.lora import merged_weights
from tests.pipelines import families
from tests.pipelines.families import FAMILIES, STEPS
from tests.rollout.conftest import (
    adapters,
    assert_same,
    check_against_policy,
    make_request,
    new_weights,
    parameters,
    publish,
    shared_group,
    transformer_with,
)
from tests.rollout.vllm_server import RemoteEngine, running_engine
from tests.support.fakes import load_model

pytestmark = pytest.mark.slow

FIRST = families.QWEN_IMAGE  # whose samples are also compared with the reference engine's
_SOME = [FIRST, *(pytest.param(other, marks=pytest.mark.thorough) for other in FAMILIES if other is not FIRST)]
REQUEST_BATCHING = pytest.mark.parametrize("family", _SOME, indirect=True, ids=lambda family: family.label)
QWEN_IMAGE = pytest.mark.parametrize("family", [FIRST], indirect=True, ids=[FIRST.label])


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.label)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    path = case.build(folder / "checkpoint")
    policy, request_of = case.policy(path), case.case.with_media(folder).request
    with running_engine(path, case.name, dtype="float32", max_batch=8) as (engine, report):
        assert (report.version, report.digest) == (0, "")
        assert torch.accelerator.is_available() or report.uses == "attention SDPA, not compiled"
        yield SimpleNamespace(
            case=case, path=path, policy=policy, engine=engine, model=load_model(policy), request=request_of
        )


@pytest.fixture(scope="module")
def batcher(family: SimpleNamespace) -> Iterator[RemoteEngine]:
    """Provides an engine that batches requests, of the same checkpoint, and offloads its encoders."""
    options = {"dtype": "float32", "max_batch": 8, "batching": "request", "offload": True}
    with running_engine(family.path, family.case.name, **options) as (engine, _):
        yield engine


@pytest.fixture
def engine(family: SimpleNamespace) -> Iterator[RemoteEngine]:
    """Provides the engine with the checkpoint's weights, and restores them afterwards."""
    yield family.engine
    restore(family.engine, family)


def restore(engine: RemoteEngine, family: SimpleNamespace) -> None:
    engine("stage", *publish(0, parameters(family.model)))
    engine("swap", 0)


def mixed(family: SimpleNamespace) -> list[SampleRequest]:
    plain, guided = family.case.specs
    return [
        *(family.request(spec, i) for i, spec in enumerate([plain, guided, plain, guided])),
        family.request(plain, 4, sde_kind="cps", noise_level=0.9),
        family.request(guided, 5, num_inference_steps=5, window=SdeWindow(0, 3)),
        family.request(guided, 6, window=SdeWindow(0, STEPS - 1)),  # over the boundary of two experts
    ]


# ---- against the reference engine ------------------------------------------------------------------------------------


def reference(family: SimpleNamespace, requests: list[SampleRequest], published: Any = None) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        engine = DiffusersEngine("reference", family.policy, dtype=torch.float32, max_batch=4, device="cpu")
        await engine.start()
        if published is not None:
            await engine.stage(*published)
            await engine.swap(published[0].version)
        made = await asyncio.gather(*[engine.generate(r) for r in requests])
        await engine.close()
        return list(made)

    return asyncio.run(main())


@QWEN_IMAGE
def test_samples_are_those_of_the_reference(family, engine):
    changes = [{}] * 4 + [{"sde_kind": "cps"}, {"sde_kind": "dance"}, {"initial_seed": 3}, {"num_inference_steps": 9}]
    changes += [{"window": None, "noise_level": 0.0, "fields": ("final",)}, {"true_cfg_scale": 3.0}]
    changes += [{"true_cfg_scale": 3.0}, {"width": 64}]
    requests = [make_request(i, **change) for i, change in enumerate(changes)]
    assert engine("is_grad_ready", requests[0])
    for one, expected in zip(engine("generate", requests), reference(family, requests), strict=True):
        assert_same(one, expected, 1e-4)


@QWEN_IMAGE
def test_adapters_are_swapped_between_steps(family, engine):
    policy, about = family.policy, {"rank": 2, "alpha": 4.0}
    first, second = (publish(version, adapters(policy, seed=version), about) for version in (1, 2))
    requests = [make_request(i, num_inference_steps=60, window=SdeWindow(start=2, size=50)) for i in range(3)]
    engine("stage", *first)
    _, made = engine("swap_in_flight", requests, 1, 5)
    merged = dict(merged_weights(load_model(policy).state_dict(), adapters(policy, seed=1), scale=2.0))
    models = {0: transformer_with(policy, None), 1: transformer_with(policy, merged)}
    for request, one in zip(requests, made, strict=True):
        assert [version for version, _ in one.versions.spans] == [0, 1]
        check_against_policy(policy, models, request, one)
    engine("stage", *second)
    engine("swap", 2)
    [made] = engine("generate", [make_request()])
    assert made.versions.spans == ((2, 6),)
    assert_same(made, *reference(family, [make_request()], second), 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["step", "request"])
@QWEN_IMAGE
def test_a_group_shares_its_prefix(family, engine, batcher, how):
    """Ten samples do not fit the batch of eight: the last two continue from the stored latents."""
    running = engine if how == "step" else batcher
    groups = [shared_group(4, number, start) for number, start in enumerate((3, 2))]
    requests = [*groups[0], make_request(90), *groups[1], make_request(91)]
    alone = running("generate", requests)
    running("_call", "note_rows")
    running("_call", "begin", 2**29, how == "request", True)
    made = running("generate", requests)
    # Only the sum: who takes a step for the others depends on who is in the batch by then.
    steps = sum(running("_call", "noted_rows")["rows"])
    assert steps == sum(6 - one.shared_steps for one in made) == 6 * 10 - 3 * 3 - 3 * 2
    for one, other, expected in zip(alone, made, reference(family, requests), strict=True):
        assert one.shared_steps == 0
        assert_same(one, other, 1e-5)
        assert_same(other, expected, 1e-4)
    running("_call", "begin", 2**29, how == "request", False)


@QWEN_IMAGE
def test_failing_calls_and_impossible_requests(engine):
    with pytest.raises(EngineError, match="always fails"):
        engine("_call", "fail")
    with pytest.raises(EngineError, match="no_such_method"):
        engine("_call", "no_such_method")
    long = make_request(1, prompt=Prompt(index=1, text="x y " * 1100))
    fine, refused, misfit = engine("generate", [make_request(), long, make_request(2, height=40)])
    assert isinstance(fine, Trajectory) and isinstance(misfit, ValueError)
    assert isinstance(refused, ValueError) and "at most 1024" in str(refused)


@pytest.mark.thorough
def test_compiled_layers_compute_with_new_weights(tmp_path):
    path = FIRST.build(tmp_path)
    family = SimpleNamespace(policy=FIRST.policy(path))
    requests = [make_request(i) for i in range(3)] + [make_request(3, true_cfg_scale=3.0), make_request(4, width=64)]
    versions = [
        publish(1, new_weights(family.policy, seed=1)),
        publish(2, parameters(load_model(family.policy))),
        publish(3, adapters(family.policy, seed=2), {"rank": 2, "alpha": 4.0}),
    ]
    with running_engine(path, FIRST.name, dtype="float32", max_batch=8, compiled="on") as (engine, report):
        assert report.uses == "attention SDPA, compiled"
        engine("generate", requests)
        graphs = engine("_call", "graphs")
        assert graphs["graphs"] > 0
        for published in versions:
            engine("stage", *published)
            engine("swap", published[0].version)
            made = engine("generate", requests)
            for one, expected in zip(made, reference(family, requests, published), strict=True):
                assert_same(one, expected, 1e-4)
        assert engine("_call", "graphs") == graphs


@pytest.mark.thorough
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_both_dtypes_on_an_accelerator(tmp_path, dtype, tolerance):
    path = FIRST.build(tmp_path)
    policy = FIRST.policy(path)
    weights = new_weights(policy, seed=1)
    with running_engine(path, FIRST.name, dtype=dtype, max_batch=4) as (engine, report):
        assert ("SDPA" in report.uses) or dtype == "bfloat16"
        engine("stage", *publish(1, weights))
        engine("swap", 1)
        [made] = engine("generate", [make_request()])
    assert made.versions.spans == ((1, 6),)
    check_against_policy(policy, {1: transformer_with(policy, weights)}, make_request(), made, tolerance)


# ---- request batching ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@REQUEST_BATCHING
def test_samples_are_those_of_step_wise_batching(family, batcher):
    requests = [*mixed(family), family.request(family.case.specs[0], 7, window=None, noise_level=0.0)]
    batcher("_call", "forget_batches")
    together = batcher("generate", requests)
    assert batcher("_call", "batches")["samples"] == [len(requests)]
    for request, one in zip(requests, together, strict=True):
        [alone], [other] = (engine("generate", [request]) for engine in (batcher, family.engine))
        assert_same(alone, other, 0 if request in requests[:2] else 1e-5)
        assert_same(one, alone, 1e-5)  # sums of a batch round in another order


@pytest.mark.thorough
@REQUEST_BATCHING
def test_weights_are_swapped_between_batches(family, batcher):
    spec = family.case.specs[0]
    manifest, buckets = publish(1, {name: weight + 0.02 for name, weight in parameters(family.model).items()})
    for engine in (batcher, family.engine):
        engine("stage", manifest, buckets)
    requests = [family.request(spec, i, num_inference_steps=60, window=SdeWindow(2, 50)) for i in range(20)]
    report, made = batcher("swap_while_running", requests, 1)
    assert (report.version, report.digest) == (1, manifest.digest)
    assert {0, 1} == {version for one in made for version in one.versions}
    assert all(len(set(one.versions)) == 1 for one in made)
    family.engine("swap", 1)
    later = family.request(spec)
    assert_same(*(engine("generate", [later])[0] for engine in (batcher, family.engine)), 1e-6)
    for engine in (batcher, family.engine):
        restore(engine, family)


@pytest.mark.thorough
@QWEN_IMAGE
def test_unusable_prompts_fail_alone(family, batcher):
    fine, refused = make_request(), make_request(1, prompt=Prompt(index=1, text="x y " * 1100))
    one, other = batcher("generate", [fine, refused])
    assert_same(one, family.engine("generate", [fine])[0], 1e-6)
    [alone] = batcher("generate", [refused])
    for failed in (other, alone):
        assert isinstance(failed, ValueError) and "at most 1024" in str(failed)
