"""Provides a tiny Qwen-Image, requests, published versions, and the properties of every engine's trajectories."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image.tiny import build
from torch.testing import assert_close

from omni_async.diffusion.policy import Policy, modalities_of
from omni_async.diffusion.sde.transitions import log_prob, log_prob_by_part, nats_per_log_prob, transition
from omni_async.rollout.base import Trajectory
from omni_async.types import SampleRequest, SdeWindow, WeightManifest
from tests.pipelines import families
from tests.support.fakes import load_model
from tests.support.packing import pack

Published = tuple[WeightManifest, list[np.ndarray]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("rollout"), layers=2))


@pytest.fixture(scope="session")
def policy(checkpoint: str) -> QwenImagePolicy:
    return QwenImagePolicy(checkpoint)


def make_request(number: int = 0, **changes: Any) -> SampleRequest:
    """Makes a request of 64 x 32 pixels and six steps, without guidance."""
    size = {"height": 64, "width": 32}
    chosen = {name: changes.pop(name) for name in QwenImageSampling.__struct_fields__ if name in changes}
    spec = QwenImageSampling(**(size | chosen))
    return families.make_request(spec, number, **({"num_inference_steps": 6} | changes))


def shared_group(size: int, number: int = 0, start: int = 2, **changes: Any) -> list[SampleRequest]:
    """Makes the requests of a group: one prompt, one initial noise and one window of two of six steps."""
    common = {"prompt": make_request(number).prompt, "initial_seed": 77 + number, "window": SdeWindow(start, 2)}
    return [make_request(100 * number + sample, **(common | changes)) for sample in range(size)]


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def new_weights(policy: Policy, seed: int) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's denoisers with noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = parameters(load_model(policy))
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def adapters(policy: Policy, seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """Returns LoRA matrices for the attention of every block, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in load_model(policy).state_dict().items():
        module = name.removesuffix(".weight")
        if module.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            found[f"{module}.lora_A.weight"] = 0.2 * torch.randn(rank, weight.shape[1], generator=generator)
            found[f"{module}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], rank, generator=generator)
    return found


def publish(version: int, tensors: dict[str, torch.Tensor], lora: dict[str, Any] | None = None) -> Published:
    return pack(tensors.items(), version=version, payload="lora" if lora else "full", bucket_bytes=100_000, lora=lora)


def damaged(published: Published) -> Published:
    manifest, buckets = published
    broken = [bucket.copy() for bucket in buckets]
    broken[-1][5] ^= 1
    return manifest, broken


def transformer_with(policy: Policy, weights: dict[str, torch.Tensor] | None) -> torch.nn.Module:
    model = load_model(policy)
    model.load_state_dict(weights or {}, strict=False)
    return model


def check_against_policy(
    policy: Policy,
    models: Mapping[int, torch.nn.Module],
    request: SampleRequest,
    made: Trajectory,
    tolerance: float = 1e-5,
) -> None:
    """Recomputes each trained step by the version that took it: mean and log-prob, per element and in nats of all."""
    t, versions = made.tensors, [*made.versions]
    assert t["steps"].tolist() == list(request.window.steps)
    assert (t["latents"].dtype, t["log_probs"].dtype) == (torch.float32, torch.float64)
    assert len(versions) == request.num_inference_steps
    stacked = policy.stack_conditioning([t["conditioning"]])
    for k, step in enumerate(request.window.steps):
        sigma, sigma_next, x = t["sigmas"][step : step + 1], t["sigmas"][step + 1 : step + 2], t["latents"][k : k + 1]
        with torch.no_grad():
            v = policy.velocity(models[versions[step]], x, sigma, stacked, request.spec)
        level = torch.tensor([request.noise_level])
        expected = transition(request.sde_kind, x, v, sigma, sigma_next, t["sigmas"][1:2], level)
        assert_close(t["means"][k : k + 1], expected.mean, rtol=0, atol=tolerance)
        recomputed = log_prob(request.sde_kind, t["latents"][k + 1 : k + 2], expected.mean, expected.scale)
        assert_close(t["log_probs"][k : k + 1], recomputed, rtol=0, atol=tolerance)
        if modalities := modalities_of(policy, request.spec):
            after = t["latents"][k + 1 : k + 2]
            parts = log_prob_by_part(request.sde_kind, after, expected.mean, expected.scale, modalities.values())
            assert_close(t["modality_log_probs"][k], torch.cat(parts), rtol=0, atol=tolerance)
        nats = nats_per_log_prob(request.sde_kind, expected.scale.double(), x.numel())
        assert (nats * (recomputed - t["log_probs"][k])).abs().max() <= 1000 * tolerance


def assert_same(a: Trajectory, b: Trajectory, tolerance: float) -> None:
    """Asserts same fields and values to `tolerance`; a pixel may round to its neighbour."""
    assert set(a.tensors.keys()) == set(b.tensors.keys())
    flat_a, flat_b = (t.tensors.flatten_keys(".") for t in (a, b))
    for key in flat_a.keys():  # noqa: SIM118
        if flat_a[key].is_floating_point():
            assert_close(flat_a[key], flat_b[key], rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")
        else:
            assert torch.equal(flat_a[key], flat_b[key])
    assert a.media.parts == b.media.parts
    for part in a.media.parts:
        one, other = (torch.as_tensor(getattr(sample.media, part)).float() for sample in (a, b))
        assert (one - other).abs().max() <= (10 * tolerance if part == "audio" else 1)
    assert a.versions == b.versions
