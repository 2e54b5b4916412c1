"""Tests statistics of corrected samples of a linear Gaussian SDE, velocity v = a x, where every expectation is known in
closed form."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from omni_async.algorithms.correction import Drift, correct, effective_sample_size
from omni_async.config.algorithm import Correction
from omni_async.sde.transitions import log_prob, nats_per_log_prob, take_step, transition

COUNT = 100_000
SIGMAS = (0.9, 0.7, 0.5, 0.3)
STEPS = len(SIGMAS) - 1
NOISE_LEVEL = 0.6
KINDS = ("flow", "dance", "cps")
EXACT = Correction(mode="decoupled", weights="importance", cap=None)
EXACT_TRAJECTORY = Correction(mode="decoupled", weights="importance", level="trajectory", cap=None)


@dataclass
class Sampled:
    """Latents (W + 1, N, D), and of the same N samples the drift to the proximal policy."""

    latents: list[Tensor]
    drift: Drift


def step_numbers(count, step):
    return [
        torch.full((count,), value, dtype=torch.float64)
        for value in (SIGMAS[step], SIGMAS[step + 1], SIGMAS[1], NOISE_LEVEL)
    ]


def sample(kind, behaviour, proximal, dim=3, start=None, seed=0):
    """Draws samples of policies `behaviour` (N, W), a coefficient of v = a x for each step of each sample; log-probs
    recorded as steps are taken."""
    generator = torch.Generator().manual_seed(seed)
    count = len(behaviour)
    x = torch.randn(count, dim, dtype=torch.float64, generator=generator) if start is None else start.expand(count, dim)
    latents, log_ratios, kappas = [x], [], []
    for step in range(behaviour.shape[1]):
        numbers = step_numbers(count, step)
        noise = torch.randn(count, dim, dtype=torch.float64, generator=generator)
        x_next, recorded, mean = take_step(kind, x, behaviour[:, step, None] * x, *numbers, noise)
        p = transition(kind, x, proximal * x, *numbers)
        nats = nats_per_log_prob(kind, p.scale, dim)
        log_ratios.append(nats * (log_prob(kind, x_next, p.mean, p.scale) - recorded))
        kappas.append(((p.mean - mean) / p.scale[:, None]).square().sum(dim=1) / 2)
        x = x_next
        latents.append(x)
    return Sampled(latents, Drift(torch.stack(log_ratios, dim=1), torch.stack(kappas, dim=1)))


def closed_form(kind, a, step):
    """Returns (c, S) of one element: x' = c x + S eps."""
    one = torch.ones(1, 1, dtype=torch.float64)
    got = transition(kind, one, a * one, *step_numbers(1, step))
    return got.mean.item(), got.scale.item()


def deviation(values, expected):
    """Returns how many standard errors the mean of values (N,) is off."""
    return abs((values - expected).mean()).item() / ((values - expected).std().item() / math.sqrt(len(values)))


def one_version(a, steps=STEPS):
    return torch.full((COUNT, steps), a, dtype=torch.float64)


def changing_version():
    """Switches each sample from an older to a newer version before its step 0, 1, 2 or never."""
    switch = torch.randint(0, STEPS + 1, (COUNT, 1), generator=torch.Generator().manual_seed(9))
    return torch.where(torch.arange(STEPS) < switch, 0.3, 0.6).to(torch.float64)


@pytest.mark.parametrize("behaviour", [one_version(0.4), changing_version()], ids=["one version", "changing version"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_trajectory_weights_are_unbiased(kind, behaviour):
    proximal = 0.8
    got = sample(kind, behaviour, proximal)
    variance = 1.0
    for step in range(STEPS):
        c, scale = closed_form(kind, proximal, step)
        variance = c**2 * variance + scale**2
    end = got.latents[-1]
    weight = correct(got.drift, EXACT_TRAJECTORY, 3).weight[:, 0]
    for values, expected in ((end.square().mean(dim=1), variance), (end.cos().mean(dim=1), math.exp(-variance / 2))):
        assert deviation(weight * values, expected) < 3
        assert deviation(values, expected) > 10
    assert deviation(weight, 1.0) < 3
    per_element = correct(
        got.drift, Correction(mode="decoupled", weights="importance", level="trajectory", log_ratio="mean", cap=None), 3
    )
    assert deviation(per_element.weight[:, 0] * end.square().mean(dim=1), variance) > 5


@pytest.mark.parametrize("behaviour", [one_version(0.4), changing_version()], ids=["one version", "changing version"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_step_weights_are_unbiased_given_the_latent_the_step_started_from(kind, behaviour):
    proximal = 0.8
    got = sample(kind, behaviour, proximal)
    weight = correct(got.drift, EXACT, 3).weight
    for step in range(STEPS):
        c, scale = closed_form(kind, proximal, step)
        before, after = got.latents[step], got.latents[step + 1]
        squares = after.square().mean(dim=1), (c * before).square().mean(dim=1) + scale**2
        cosines = after.cos().mean(dim=1), (c * before).cos().mean(dim=1) * math.exp(-(scale**2) / 2)
        for values, expected in (squares, cosines):
            assert deviation(weight[:, step] * values, expected) < 3
            assert deviation(values, expected) > 5


@pytest.mark.parametrize("nats", [0.05, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_log_ratios_from_one_latent_are_normal_with_the_exact_kl(kind, nats):
    dim, behaviour = 4, 0.4
    (c_b, scale), (c_1, _) = closed_form(kind, behaviour, 0), closed_form(kind, behaviour + 1, 0)
    start = torch.tensor([[1.0, -1.0, 0.5, 2.0]], dtype=torch.float64)
    # D kappa = (change of a)^2 (dc/da)^2 |x|^2 / (2 S^2)
    change = math.sqrt(2 * nats * scale**2 / start.square().sum().item()) / abs(c_1 - c_b)
    got = sample(kind, one_version(behaviour, 1), behaviour + change, dim=dim, start=start)
    torch.testing.assert_close(got.drift.kappa, torch.full((COUNT, 1), nats, dtype=torch.float64), rtol=1e-9, atol=0)
    L = got.drift.log_ratio[:, 0]
    assert deviation(L, -nats) < 3
    standard = (L + nats) / math.sqrt(2 * nats)
    assert standard.square().mean().item() == pytest.approx(1, rel=0.02)
    assert standard.pow(3).mean().item() == pytest.approx(0, abs=0.03)
    assert standard.pow(4).mean().item() == pytest.approx(3, rel=0.03)
    assert effective_sample_size(L).item() == pytest.approx(math.exp(-2 * nats), rel=0.02)
