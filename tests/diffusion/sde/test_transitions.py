import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.diffusion.sde.schedules import linear
from omni_async.diffusion.sde.transitions import (
    KINDS,
    log_prob,
    nats_per_log_prob,
    ode_step,
    step_mixed,
    take_step,
    transition,
)
from omni_async.rollout.stepping import InFlight, check_request, take_steps
from omni_async.types import SdeWindow
from tests.rollout.conftest import make_request

SHAPE = (3, 5)


def rows(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def example(seed, batch, dtype=torch.float64, sigma_one=False, shape=SHAPE):
    """Returns x, v, sigma, sigma_next, sigma_max, noise_level, noise of random rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return (low + (high - low) * torch.rand(batch, generator=generator, dtype=torch.float64)).to(dtype)

    x, v, noise = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    sigma = torch.ones(batch, dtype=dtype) if sigma_one else uniform(0.3, 0.97)
    return x, v, sigma, sigma * uniform(0.5, 0.95), torch.full((batch,), 0.96, dtype=dtype), uniform(0.2, 1.0), noise


def published(kind, x, v, s, s_next, s_max, n):
    """Computes mean, std and scale of one row with Python numbers, in the form the papers write them."""
    dt = s_next - s
    x0 = x - s * v
    if kind == "flow":
        std = n * math.sqrt(s / (1 - (s_max if s == 1 else s)))
        return x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt, std, std * math.sqrt(-dt)
    if kind == "dance":
        score = -(x - (1 - s) * x0) / s**2
        return x + dt * v - 0.5 * n**2 * score * dt, n * math.sqrt(-dt), n * math.sqrt(-dt)
    eps = x + (1 - s) * v
    scale = s_next * math.sin(n * math.pi / 2)
    return (1 - s_next) * x0 + math.sqrt(s_next**2 - scale**2) * eps, scale, scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma_one", [False, True])
def test_a_velocity_error_moves_the_log_ratio_by_as_many_nats_as_the_transition_states(kind, sigma_one):
    x, v, *numbers, noise = example(3, 4, sigma_one=sigma_one)
    other = v + 0.01 * torch.randn(v.shape, generator=torch.Generator().manual_seed(4), dtype=v.dtype)
    one, two = transition(kind, x, v, *numbers), transition(kind, x, other, *numbers)
    scale = one.scale[:, None, None]
    x_next = one.mean + scale * noise
    values = [log_prob(kind, x_next, step.mean, step.scale) for step in (one, two)]
    nats = nats_per_log_prob(kind, one.scale, v[0].numel()) * (values[1] - values[0])
    std = one.nats_per_velocity * (other - v).square().flatten(1).mean(1).sqrt()
    toward = ((two.mean - one.mean) / scale * noise).flatten(1).sum(1)  # normal with this standard deviation
    torch.testing.assert_close(nats, toward - std.square() / 2, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(((two.mean - one.mean) / scale).flatten(1).norm(dim=1), std)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma_one", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_a_transition_is_the_published_formula(kind, sigma_one, dtype, tolerance):
    x, v, *numbers, _ = example(1, 4, dtype, sigma_one)
    got = transition(kind, x, v, *numbers)
    assert got.mean.dtype == got.std.dtype == got.scale.dtype == dtype
    for row in range(4):
        mean, std, scale = published(kind, x[row].double(), v[row].double(), *(float(value[row]) for value in numbers))
        torch.testing.assert_close(got.mean[row].double(), mean, atol=tolerance, rtol=tolerance)
        assert got.std[row].item() == pytest.approx(std, rel=tolerance)
        assert got.scale[row].item() == pytest.approx(scale, rel=tolerance)


@pytest.mark.parametrize("kind", ["flow", "dance"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_log_prob_is_torchs_normal_density_averaged_over_elements(kind, dtype, tolerance):
    *inputs, noise = example(2, 4, dtype)
    x_next, value, mean = take_step(kind, *inputs, noise)
    scale = transition(kind, *inputs).scale
    normal = torch.distributions.Normal(mean.double(), scale.double()[:, None, None])
    torch.testing.assert_close(
        value.double(), normal.log_prob(x_next.double()).mean(dim=(1, 2)), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_gradcheck(kind):
    x, v, *numbers, noise = example(5, 2)
    x_next = take_step(kind, x, v, *numbers, noise)[0]

    def of_velocity(velocity):
        step = transition(kind, x, velocity, *numbers)
        return log_prob(kind, x_next, step.mean, step.scale), step.mean

    assert torch.autograd.gradcheck(of_velocity, (v.requires_grad_(),))


def test_the_first_step_takes_sigma_max_only_where_sigma_is_exactly_one():
    x, v, _, _, _, n, _ = example(8, 2)
    sigma, sigma_next = rows(1.0, 1 - 2**-20), rows(0.9, 0.9)
    got = transition("flow", x, v, sigma, sigma_next, rows(0.8, 0.8), n)
    assert got.std[0].item() == pytest.approx(n[0].item() * math.sqrt(1 / 0.2))
    assert got.std[1].item() == pytest.approx(n[1].item() * math.sqrt(2**20 - 1))


@pytest.mark.parametrize("shape", [(4096, 16), (16383,), (16385,), (3, 70_001)])
def test_a_large_row_depends_neither_on_its_batch_nor_on_the_number_of_threads(shape):
    inputs = example(11, 4, torch.float32, shape=shape)
    one_thread = take_step("flow", *inputs)[1]
    torch.set_num_threads(4)
    try:
        together = take_step("flow", *inputs)[1]
        alone = [take_step("flow", *(tensor[row : row + 1] for tensor in inputs))[1] for row in range(4)]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, one_thread)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), noisy=st.lists(st.booleans(), min_size=1, max_size=9))
@settings(max_examples=25, deadline=None)
def test_mixed_rows_are_bit_identical_to_their_own_steps(kind, seed, noisy):
    x, v, s, s_next, s_max, n, noise = example(seed, len(noisy), torch.float32, shape=(7, 3))
    noisy = torch.tensor(noisy)
    n = torch.where(noisy, n, 0.0)
    noise[~noisy] = math.nan
    x_next, value, mean = step_mixed(kind, x, v, s, s_next, s_max, n, noise, noisy)
    for row in range(len(noisy)):
        own = [tensor[row : row + 1] for tensor in (x, v, s, s_next, s_max, n, noise)]
        if noisy[row]:
            expected = take_step(kind, *own)
        else:
            euler = ode_step(*own[:4])
            expected = (euler, torch.zeros(1), euler)
        for got, wanted in zip((x_next, value, mean), expected, strict=True):
            assert torch.equal(got[row], wanted[0])


@pytest.mark.parametrize("kind", KINDS)
def test_ode_rows_of_a_mixed_batch_give_no_nan_gradient(kind):
    x, v, s, s_next, s_max, n, noise = example(9, 3)
    v.requires_grad_()
    noisy = torch.tensor([True, False, True])
    s_next = torch.where(noisy, s_next, 0.0)
    _, value, _ = step_mixed(kind, x, v, s, s_next, s_max, torch.where(noisy, n, 0.0), noise, noisy)
    value.sum().backward()
    assert value[1] == 0
    assert torch.equal(v.grad[1], torch.zeros(SHAPE, dtype=torch.float64))
    assert v.grad[0].abs().max() > 0


def test_bfloat16_velocity_is_upcast_and_bfloat16_latents_are_refused():
    x, v, *numbers, _ = example(10, 2, torch.float32)
    half = v.to(torch.bfloat16)
    assert torch.equal(transition("flow", x, half, *numbers).mean, transition("flow", x, half.float(), *numbers).mean)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        transition("flow", x.to(torch.bfloat16), v, *numbers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sde"}, r"expected one of \['flow', 'cps', 'dance'\], got 'sde'"),
        ({"noise_level": rows(0.7, 0.0)}, "noise_level.*got 0.0 in row 1"),
        ({"noise_level": rows(math.nan, 0.7)}, "noise_level.*got nan in row 0"),
        ({"kind": "cps", "sigma_next": rows(0.4, 0.0)}, "sigma_next.*'cps'.*got 0.0 in row 1"),
        ({"kind": "cps", "noise_level": rows(0.7, 2.0)}, "noise_level.*'cps'.*got 2.0 in row 1"),
        ({"sigma": rows(0.5, 1.5)}, r"sigma must be in \(0, 1\], got 1.5 in row 1"),
        ({"sigma_next": rows(0.6, 0.4)}, r"sigma_next must be in \[0, sigma\), got 0.6 in row 0"),
        ({"sigma": rows(1.0, 0.5), "sigma_max": rows(1.0, 1.0)}, "sigma_max.*got 1.0 in row 0"),
        ({"sigma": rows(0.5)}, r"sigma must have shape \(2,\).*got \(1,\)"),
        ({"v": torch.zeros(2, 3)}, r"v must have shape \(2, 4\).*got \(2, 3\)"),
        ({"noise": torch.zeros(1, 4)}, r"noise must have shape \(2, 4\).*got \(1, 4\)"),
    ],
)
def test_wrong_input_is_refused_with_its_value(change, message):
    numbers = {"sigma": 0.5, "sigma_next": 0.4, "sigma_max": 0.9, "noise_level": 0.7}
    good = {name: rows(value, value) for name, value in numbers.items()} | {"kind": "flow"}
    good |= dict.fromkeys(("x", "v", "noise"), torch.zeros(2, 4, dtype=torch.float64))
    take_step(**good)
    with pytest.raises(ValueError, match=message):
        take_step(**(good | change))
    if change.get("kind") != "cps" and "sigma" not in change and "sigma_next" not in change:
        with pytest.raises(ValueError, match=message):
            step_mixed(**(good | change), noisy=torch.tensor([True, True]))


LATENTS = (16, 64)


def test_shared_initial_noise_leaves_step_noise_apart():
    a, b = (InFlight(make_request(seed=seed, initial_seed=5), linear(6), LATENTS) for seed in (1, 2))
    assert torch.equal(a.latents, b.latents)
    take_steps([a, b], torch.zeros(2, *LATENTS), 0)
    assert not torch.equal(a.latents, b.latents)


def test_samples_at_different_steps_of_different_kinds_move_as_if_alone():
    def samples() -> list[InFlight]:
        made = [
            InFlight(make_request(i, sde_kind=kind, window=window, num_inference_steps=steps), linear(steps), LATENTS)
            for i, (kind, window, steps) in enumerate(
                [
                    ("flow", SdeWindow(start=0, size=2), 6),
                    ("cps", SdeWindow(start=1, size=3), 5),
                    ("dance", None, 4),
                    ("dance", SdeWindow(start=0, size=1), 6),
                ]
            )
        ]
        take_steps(made[:2], torch.zeros(2, *LATENTS), 0)
        return made

    velocity = torch.randn(4, *LATENTS)
    batch, alone = samples(), samples()
    for _ in range(3):
        moved = take_steps(batch, velocity, 1)
        for row, sample in enumerate(alone):
            own = take_steps([sample], velocity[row : row + 1], 1)
            assert torch.equal(own[0], moved[row])
            assert (sample.step, sample.versions) == (batch[row].step, batch[row].versions)
    for sample, other in zip(alone, batch, strict=True):
        for name, value in sample.tensors().items():
            assert torch.equal(value, other.tensors()[name])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"window": SdeWindow(start=3, size=3)}, "trained steps"),
        ({"sde_kind": "euler"}, "sde_kind"),
        ({"noise_level": 0.0}, "noise_level"),
        ({"sde_kind": "cps", "noise_level": 2.5}, "noise_level"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"fields": ("velocities",)}, "velocities"),
    ],
)
def test_impossible_requests_are_refused_by_name(changes, names):
    with pytest.raises(ValueError, match=names):
        check_request(make_request(**changes))
