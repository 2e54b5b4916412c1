"""Tests request batching on a real vLLM-Omni against step-wise batching: the same samples, from the same requests. Each
family has an engine of either kind, in child processes."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm_omni")

from omni_async.types import Prompt, SampleRequest, SdeWindow
from tests.fakes import load_model
from tests.pipelines.families import FAMILIES, make_request, parameters
from tests.rollout.checks import assert_same
from tests.rollout.conftest import publish
from tests.rollout.vllm_server import running_engine

pytestmark = pytest.mark.slow

FIRST, *OTHERS = FAMILIES


@pytest.fixture(
    scope="module",
    params=[FIRST, *(pytest.param(family, marks=pytest.mark.thorough) for family in OTHERS)],
    ids=lambda family: family.label,
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    case = request.param
    path = case.build(tmp_path_factory.mktemp(case.name))
    options = {"dtype": "float32", "max_batch": 8}
    with (
        running_engine(path, case.name, batching="step", **options) as (stepwise, _),
        running_engine(path, case.name, batching="request", **options) as (engine, _),
    ):
        model = load_model(case.policy(path))
        yield SimpleNamespace(case=case, stepwise=stepwise, engine=engine, model=model)


def mixed(family: SimpleNamespace) -> list[SampleRequest]:
    """Makes requests of different specs, windows, prompts, kinds and step counts."""
    plain, guided = family.case.specs
    return [
        *(make_request(spec, i) for i, spec in enumerate([plain, guided, plain, guided])),
        make_request(plain, 4, sde_kind="cps", noise_level=0.9),
        make_request(guided, 5, num_inference_steps=5, window=SdeWindow(0, 3)),
        make_request(plain, 6, num_inference_steps=12, window=None, noise_level=0.0, fields=("final",)),
    ]


def test_samples_are_those_of_step_wise_batching_and_the_same_alone_and_in_a_batch(family):
    requests = mixed(family)
    family.engine("call", "forget_batches")
    together = family.engine("generate", requests)
    assert family.engine("call", "batches")["samples"] == [len(requests)]
    for request, one, other in zip(requests, together, family.stepwise("generate", requests), strict=True):
        assert_same(one, other, 1e-6)
        [alone] = family.engine("generate", [request])
        assert_same(one, alone, 1e-5)


def test_a_request_alone_is_that_of_step_wise_batching_bit_for_bit(family):
    for spec in family.case.specs:
        [one], [other] = (engine("generate", [make_request(spec)]) for engine in (family.engine, family.stepwise))
        assert all(
            torch.equal(one.tensors[name], other.tensors[name]) for name in ("latents", "log_probs", "means", "final")
        )
        [part] = one.media.parts
        assert torch.equal(torch.as_tensor(getattr(one.media, part)), torch.as_tensor(getattr(other.media, part)))


def test_weights_are_swapped_between_batches_and_never_inside_a_sample(family):
    spec = family.case.specs[0]
    new = {name: weight + 0.02 for name, weight in parameters(family.model).items()}
    manifest, buckets = publish(1, new)
    for engine in (family.engine, family.stepwise):
        engine("stage", manifest, buckets)
    requests = [make_request(spec, i, num_inference_steps=60, window=SdeWindow(2, 50)) for i in range(20)]
    report, made = family.engine("swap_while_running", requests, 1)
    assert (report.version, report.digest) == (1, manifest.digest)
    assert {0, 1} == {version for one in made for version in one.versions}
    assert all(len(set(one.versions)) == 1 for one in made)
    family.stepwise("swap", 1)
    later = make_request(spec)
    assert_same(*(engine("generate", [later])[0] for engine in (family.engine, family.stepwise)), 1e-6)
    for engine in (family.engine, family.stepwise):
        engine("stage", *publish(0, parameters(family.model)))
        engine("swap", 0)


@pytest.mark.parametrize("family", [FIRST], indirect=True, ids=[FIRST.label])
def test_a_prompt_that_cannot_be_encoded_fails_alone(family):
    """Asks Qwen-Image, the only family that refuses a long prompt: others cut it."""
    spec = family.case.specs[0]
    fine, refused = (
        make_request(spec, 0),
        make_request(spec, 1, prompt=Prompt(index=1, text="x y " * 1100)),
    )
    one, other = family.engine("generate", [fine, refused])
    assert_same(one, family.stepwise("generate", [fine])[0], 1e-6)
    [alone] = family.engine("generate", [refused])
    for failed in (other, alone):
        assert isinstance(failed, ValueError) and "at most 1024" in str(failed)
