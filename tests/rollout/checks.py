"""Checks the properties of a trajectory that hold for every engine."""

from collections.abc import Mapping

import torch
from torch.testing import assert_close

from omni_async.rollout.base import Trajectory
from omni_async.sde.transitions import log_prob, transition
from omni_async.types import SampleRequest
from pipelines.qwen_image.policy import QwenImagePolicy


def check_against_policy(
    policy: QwenImagePolicy,
    models: Mapping[int, torch.nn.Module],
    request: SampleRequest,
    made: Trajectory,
    tolerance: float = 1e-5,
) -> None:
    """Recomputes every trained step with the policy contract and the version that took it: mean, log-prob, and the
    noise added."""
    t = made.tensors
    assert t["steps"].tolist() == list(request.window.steps)
    assert t["latents"].dtype == torch.float32
    versions = [*made.versions]
    assert len(versions) == request.num_inference_steps
    for k, step in enumerate(request.window.steps):
        sigma, sigma_next = t["sigmas"][step : step + 1], t["sigmas"][step + 1 : step + 2]
        with torch.no_grad():
            v = policy.velocity(
                models[versions[step]],
                t["latents"][k : k + 1],
                sigma,
                policy.stack_conditioning([t["conditioning"]]),
                request.spec,
            )
        level = torch.tensor([request.noise_level])
        expected = transition(request.sde_kind, t["latents"][k : k + 1], v, sigma, sigma_next, t["sigmas"][1:2], level)
        assert_close(t["means"][k : k + 1], expected.mean, rtol=0, atol=tolerance)
        recomputed = log_prob(request.sde_kind, t["latents"][k + 1 : k + 2], expected.mean, expected.scale)
        assert_close(t["log_probs"][k : k + 1], recomputed, rtol=0, atol=tolerance)


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
        assert (getattr(a.media, part).int() - getattr(b.media, part).int()).abs().max() <= 1
    assert a.versions == b.versions
