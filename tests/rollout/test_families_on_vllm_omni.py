"""Tests every family step by step on a real vLLM-Omni, against the policy contract and the trainer's arithmetic. Each
family has one engine, in a child process."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("vllm_omni")

from omni_async.rollout.base import Trajectory
from omni_async.sde.noise import initial_noise
from omni_async.sde.transitions import log_prob, nats_per_log_prob, transition
from omni_async.types import SampleRequest, SdeWindow
from tests.fakes import load_model
from tests.pipelines.families import FAMILIES, STEPS, euler, make_request, parameters
from tests.rollout.checks import assert_same
from tests.rollout.conftest import publish
from tests.rollout.vllm_server import running_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.label)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    case = request.param
    path = case.build(tmp_path_factory.mktemp(case.name))
    policy = case.policy(path)
    with running_engine(path, case.name, dtype="float32", max_batch=8) as (engine, _):
        yield SimpleNamespace(case=case, policy=policy, engine=engine, model=load_model(policy))


def noised(family: SimpleNamespace, seed: int) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's weights with noise on all of them."""
    generator = torch.Generator().manual_seed(seed)
    found = parameters(family.model)
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in found.items()}


def recompute(family: SimpleNamespace, request: SampleRequest, made: Trajectory, models: dict) -> None:
    """Compares the log-prob of every trained step with the trainer's: per element, and in nats of the whole sample."""
    t, versions = made.tensors, [*made.versions]
    for k, step in enumerate(request.window.steps):
        sigma, sigma_next = t["sigmas"][step : step + 1], t["sigmas"][step + 1 : step + 2]
        stacked = family.policy.stack_conditioning([t["conditioning"]])
        with torch.no_grad():
            v = family.policy.velocity(models[versions[step]], t["latents"][k : k + 1], sigma, stacked, request.spec)
        level = torch.tensor([request.noise_level])
        there = transition(request.sde_kind, t["latents"][k : k + 1], v, sigma, sigma_next, t["sigmas"][1:2], level)
        value = log_prob(request.sde_kind, t["latents"][k + 1 : k + 2], there.mean, there.scale)
        assert_close(t["log_probs"][k : k + 1], value, rtol=0, atol=1e-5)
        nats = nats_per_log_prob(request.sde_kind, there.scale.double(), t["latents"][k].numel())
        assert (nats * (value.double() - t["log_probs"][k].double())).abs().max() <= 1e-2


def test_noise_free_samples_are_those_of_the_diffusers_denoiser(family):
    requests = [make_request(spec, i, window=None, noise_level=0.0) for spec in family.case.specs for i in range(2)]
    for request, made in zip(requests, family.engine("generate", requests), strict=True):
        noise = initial_noise(request.seed, family.policy.latent_shape(request.spec))[None]
        expected = euler(family.policy, family.model, noise, made.tensors["conditioning"], request.spec)
        assert_close(made.tensors["final"][None], expected, rtol=0, atol=1e-4)
        assert torch.equal(made.tensors["sigmas"], family.policy.sigmas(STEPS, request.spec))


def test_samples_are_the_same_alone_and_in_a_batch_and_their_log_probs_are_the_trainers(family):
    """Mixes specs, windows, prompts, kinds and step counts."""
    plain, guided = family.case.specs
    requests = [make_request(spec, i) for i, spec in enumerate([plain, plain, guided, guided])]
    requests += [
        make_request(plain, 4, sde_kind="cps", noise_level=0.9),
        make_request(guided, 5, num_inference_steps=5, window=SdeWindow(0, 3)),
        make_request(guided, 6, window=SdeWindow(0, STEPS - 1)),  # over the boundary of two experts
    ]
    together = family.engine("generate", requests)
    for request, one in zip(requests, together, strict=True):
        [alone] = family.engine("generate", [request])
        assert_same(one, alone, 1e-5)
        recompute(family, request, one, {0: family.model})


def test_weights_arrive_in_mid_trajectory_and_old_ones_come_back_bit_for_bit(family):
    spec = family.case.specs[1]
    [before] = family.engine("generate", [make_request(spec)])  # alone: batches may differ by their rounding
    weights = noised(family, 1)
    published = publish(1, weights)
    requests = [make_request(spec, i, num_inference_steps=60, window=SdeWindow(2, 50)) for i in range(3)]
    family.engine("stage", *published)
    report, mixed = family.engine("swap_in_flight", requests, 1, 5)
    assert (report.version, report.digest) == (1, published[0].digest)
    new = load_model(family.policy)
    new.load_state_dict(weights, strict=False)
    for request, one in zip(requests, mixed, strict=True):
        assert {0, 1} == set(one.versions) and list(one.versions) == sorted(one.versions)
        recompute(family, request, one, {0: family.model, 1: new})
    family.engine("stage", *publish(0, parameters(family.model)))
    family.engine("swap", 0)
    [after] = family.engine("generate", [make_request(spec)])
    assert torch.equal(before.tensors["final"], after.tensors["final"])
    assert torch.equal(before.tensors["log_probs"], after.tensors["log_probs"])
