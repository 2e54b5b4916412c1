import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.kinds import num_draws
from omni_async.algorithms.objectives.forward import draw_sigmas, mean_square, noised, target
from omni_async.config.algorithm import Forward

SCHEDULE = torch.tensor([1.0, 0.9, 0.75, 0.6, 0.4, 0.02, 0.0])


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def test_noising_by_hand():
    final = torch.tensor([[[1.0, 2.0]], [[3.0, -4.0]], [[5.0, 6.0]]])
    noise = torch.tensor([[[0.0, 1.0]], [[-1.0, 2.0]], [[7.0, 8.0]]])
    expected = torch.tensor([[[0.75, 1.75]], [[1.0, -1.0]], [[7.0, 8.0]]])
    assert torch.equal(noised(final, noise, torch.tensor([0.25, 0.5, 1.0])), expected)


def test_the_target_is_the_derivative_of_the_path():
    final, noise = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator_of(0))
    sigma = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    for row in range(3):
        slope = torch.autograd.functional.jacobian(lambda s: noised(final, noise, s)[row], sigma)[..., row]  # noqa: B023
        torch.testing.assert_close(slope, target(final, noise)[row], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("noise", "sigma", "message"),
    [
        (torch.zeros(2, 1), torch.zeros(2), r"noise must have shape \(2, 3\) like final, got \(2, 1\)"),
        (torch.zeros(2, 3), torch.zeros(()), r"sigma must have shape \(2,\), a number per row, got \(\)"),
        (torch.zeros(2, 3), torch.zeros(3), r"sigma must have shape \(2,\), a number per row, got \(3,\)"),
    ],
)
def test_noising_refuses_what_would_broadcast(noise, sigma, message):
    with pytest.raises(ValueError, match=message):
        noised(torch.zeros(2, 3), noise, sigma)


def test_mean_square_keeps_the_gradient_to_its_first_argument():
    a = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]], requires_grad=True)
    b = torch.tensor([[[0.0, 4.0]], [[3.0, 4.0]]], requires_grad=True)
    value = mean_square(a, b)
    assert value.dtype == torch.float64
    assert value.tolist() == [2.5, 12.5]
    value.sum().backward()
    assert a.grad.tolist() == [[[1.0, -2.0]], [[-3.0, -4.0]]]
    assert b.grad is None


@pytest.mark.parametrize(
    ("steps", "forward", "fraction", "expected"),
    [
        (10, Forward(), 1.0, 10),
        (10, Forward(), 0.6, 6),
        (10, Forward(), 0.69, 6),
        (10, Forward(), 0.01, 1),
        (10, Forward(sigmas="schedule_wo_first"), 1.0, 9),
        (10, Forward(sigmas="schedule_wo_first"), 0.5, 4),
        (10, Forward(sigmas="logit_normal"), 0.5, 5),
        (10, Forward(draws=3), 1.0, 3),
        (10, Forward(draws=25), 0.1, 25),
    ],
)
def test_number_of_draws(steps, forward, fraction, expected):
    assert num_draws(steps, forward, fraction) == expected


@given(
    steps=st.integers(2, 30),
    draws=st.none() | st.integers(1, 70),
    fraction=st.floats(0.01, 1.0),
    kind=st.sampled_from(["schedule", "schedule_wo_first", "logit_normal"]),
)
@settings(max_examples=50, deadline=None)
def test_as_many_sigmas_are_drawn_as_announced(steps, draws, fraction, kind):
    forward = Forward(draws=draws, sigmas=kind)
    drawn = draw_sigmas(torch.linspace(1, 0, steps + 1), forward, fraction, generator_of(0))
    assert drawn.shape == (num_draws(steps, forward, fraction),)
    assert drawn.dtype == torch.float32
    assert ((drawn > 0) & (drawn <= 1)).all()


@pytest.mark.parametrize(("kind", "choices"), [("schedule", SCHEDULE[:-1]), ("schedule_wo_first", SCHEDULE[1:-1])])
def test_no_sigma_repeats_before_all_have_occurred(kind, choices):
    count = len(choices)
    for seed in range(20):
        drawn = draw_sigmas(SCHEDULE, Forward(draws=2 * count + 2, sigmas=kind), 1.0, generator_of(seed))
        for start in (0, count):
            assert torch.equal(drawn[start : start + count].sort().values, choices.sort().values)
        assert drawn[2 * count] != drawn[2 * count + 1]


def test_every_sigma_comes_first_equally_often():
    generator = generator_of(0)
    first = torch.stack([draw_sigmas(SCHEDULE, Forward(draws=1), 1.0, generator)[0] for _ in range(3000)])
    shares = torch.stack([(first == sigma).double().mean() for sigma in SCHEDULE[:-1]])
    assert shares.sum() == 1
    assert ((shares - 1 / 6).abs() < 0.03).all()  # four standard deviations


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_logit_normal_draws_once_from_each_stratum(count, shift):
    for seed in range(10):
        drawn = draw_sigmas(
            SCHEDULE.double(), Forward(draws=count, sigmas="logit_normal", shift=shift), 1.0, generator_of(seed)
        )
        t = drawn / (shift - (shift - 1) * drawn)  # the shift undone
        quantile = torch.distributions.Normal(0.0, 1.0).cdf(t.logit())
        clamped = drawn == 0.01
        strata = (quantile * count).floor()
        assert torch.equal(
            strata[~clamped].sort().values, torch.arange(count, dtype=torch.float64)[int(clamped.sum()) :]
        )


def test_logit_normal_strata_come_in_random_order():
    forward = Forward(draws=3, sigmas="logit_normal")
    orders = {tuple(draw_sigmas(SCHEDULE, forward, 1.0, generator_of(seed)).argsort().tolist()) for seed in range(60)}
    assert len(orders) == 6


def test_logit_normal_is_centred_on_the_shifted_half_and_never_below_a_hundredth():
    generator = generator_of(0)
    drawn = torch.cat(
        [draw_sigmas(SCHEDULE, Forward(draws=1000, sigmas="logit_normal", shift=0.2), 1.0, generator) for _ in range(5)]
    )
    assert drawn.median().item() == pytest.approx(0.2 * 0.5 / (1 - 0.8 * 0.5), abs=0.01)
    assert drawn.min().item() == pytest.approx(0.01, abs=1e-8)  # the first thousandth lies below before the clamp


def test_the_generator_decides():
    for kind in ("schedule", "logit_normal"):
        forward = Forward(sigmas=kind)
        first, again, other = (draw_sigmas(SCHEDULE, forward, 1.0, generator_of(seed)) for seed in (3, 3, 4))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_impossible_draws_are_refused():
    with pytest.raises(ValueError, match="num_inference_steps must be >= 1, got 0"):
        num_draws(0, Forward(), 1.0)
    with pytest.raises(ValueError, match="leaves nothing of a schedule of 1 step"):
        draw_sigmas(torch.tensor([1.0, 0.0]), Forward(draws=2, sigmas="schedule_wo_first"), 1.0, generator_of(0))
    with pytest.raises(ValueError, match=r"end in 0, got shape \(2,\): \[1.0, 0.5\]"):
        draw_sigmas(torch.tensor([1.0, 0.5]), Forward(), 1.0, generator_of(0))
