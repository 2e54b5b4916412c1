"""Tests the objectives on final latents, each against its formula, and the sigmas that they draw."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as searched
from hypothesis import strategies as st

from omni_async.algorithms.kinds import num_draws
from omni_async.algorithms.objectives.base import ForwardInputs
from omni_async.algorithms.objectives.forward import (
    awm,
    diffusion_dpo,
    diffusion_nft,
    draw_sigmas,
    log_likelihood,
    noised,
    preference,
)
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Advantage, Algorithm, Awm, Dpo, Forward, Nft

SHAPE = (2, 3)
POLICIES = ("velocity", "old_velocity", "ref_velocity", "ema_velocity")
NAMES = (*POLICIES, "final", "noise", "sigma", "advantage")
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


def make_rows(count=6, *, dtype=torch.float64, seed=0, draws=1, progress=0.0, without=(), **changes):
    """Makes rows of standard normal latents and velocities, sigma in (0.05, 1), advantages of both signs beyond +-5."""
    generator = torch.Generator().manual_seed(seed)
    # drawn in float64 whatever the dtype, so that float32 rows are the float64 ones rounded
    names = ("velocity", "final", "noise", "old_velocity", "ref_velocity", "ema_velocity")
    tensors = {name: torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64) for name in names}
    tensors["sigma"] = 0.05 + 0.95 * torch.rand(count, generator=generator, dtype=torch.float64)
    tensors["advantage"] = 4 * torch.randn(count, generator=generator, dtype=torch.float64)
    rows = ForwardInputs(**{name: value.to(dtype) for name, value in tensors.items()}, draws=draws, progress=progress)
    rows = replace(rows, **changes, **dict.fromkeys(without))
    return replace(rows, velocity=rows.velocity.detach().clone().requires_grad_())


def make_pairs(**changes):
    """Makes three pairs with common noise and sigma; the margin is positive in some of them and negative in others."""
    rows = make_rows(6, seed=2, **changes)
    return replace(rows, noise=rows.noise[::2].repeat_interleave(2, dim=0), sigma=rows.sigma[::2].repeat_interleave(2))


def per_row_gradient(loss, rows):
    """Returns (R, ...): the gradient of the summed loss with respect to the velocity."""
    return torch.autograd.grad(loss.sum(), rows.velocity, retain_graph=True)[0]


def error(a, b):
    """Returns the mean square of the difference of each row."""
    return (a - b).square().flatten(1).mean(1)


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


def assert_same_loss(objective, rows, algorithm, formula, tolerance):
    """Compares losses and gradients with those of the formula."""
    loss, expected = objective(rows, algorithm).loss, formula(rows, algorithm)
    close(loss, expected, tolerance)
    close(per_row_gradient(loss, rows), per_row_gradient(expected, rows), tolerance)


CASES = {
    "diffusion_nft": Algorithm(kl_coef=0.1, nft=Nft(beta=0.1)),
    "awm": Algorithm(kl_coef=0.1, awm=Awm(ema_coef=0.1)),
    "diffusion_dpo": Algorithm(),
}
cases = pytest.mark.parametrize("name", CASES)


def test_every_objective_on_final_latents_is_covered_here():
    others = ("transition", "distillation", "token")
    assert {objective.name for objective in BUILT_IN if objective.kind not in others} == CASES.keys()


@cases
def test_a_pair_of_rows_does_not_depend_on_its_batch(name):
    rows, compute = make_pairs(dtype=torch.float32), find_objective(name).load()
    together = compute(rows, CASES[name])
    for first in range(0, 6, 2):
        own = slice(first, first + 2)
        alone = compute(replace(rows, **{field: getattr(rows, field)[own] for field in NAMES}), CASES[name])
        assert torch.equal(together.loss[own], alone.loss)
        assert all(torch.equal(together.metrics[metric][own], value) for metric, value in alone.metrics.items())


@cases
@pytest.mark.parametrize(("dtype", "of_loss"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_losses_have_the_velocitys_dtype_or_float32_and_metrics_are_detached(name, dtype, of_loss):
    rows, compute = make_pairs(dtype=dtype), find_objective(name).load()
    out = compute(rows, CASES[name])
    assert out.loss.dtype == of_loss
    exact = compute(replace(rows, **{field: getattr(rows, field).double() for field in NAMES}), CASES[name])
    torch.testing.assert_close(out.loss, exact.loss.to(of_loss))
    assert all((m.shape, m.dtype, m.requires_grad) == ((6,), of_loss, False) for m in out.metrics.values())


@cases
def test_only_the_current_velocity_gets_a_gradient(name):
    rows = make_pairs()
    leaves = {field: getattr(rows, field).detach().requires_grad_() for field in (*POLICIES, "advantage")}
    find_objective(name).load()(replace(rows, **leaves), CASES[name]).loss.sum().backward()
    reached = {field for field, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()}
    assert reached == {"velocity"}


def nft(*, beta=1.0, mode="all", clip_max=5.0, kl_coef=0.0):
    return Algorithm(kl_coef=kl_coef, advantage=Advantage(clip_max=clip_max), nft=Nft(beta=beta, adv_mode=mode))


def nft_formula(rows, algorithm):
    """Computes DiffusionNFT's loss; its self-normalising weights get no gradient."""
    a, beta, sigma = algorithm.advantage.clip_max, algorithm.nft.beta, rows.sigma[:, None, None]
    x = (1 - sigma) * rows.final + sigma * rows.noise
    r = rows.advantage.clamp(-a, a) / (2 * a) + 0.5
    total = algorithm.kl_coef * error(rows.velocity, rows.ref_velocity)
    for share, sign in ((r, 1), (1 - r, -1)):
        velocity = rows.old_velocity + sign * beta * (rows.velocity - rows.old_velocity)
        predicted = x - sigma * velocity
        weight = (predicted - rows.final).detach().abs().flatten(1).mean(1)
        total = total + a * share * error(predicted, rows.final) / weight / beta
    return total


@dtypes
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
def test_diffusion_nft_is_its_formula(beta, dtype, tolerance):
    assert_same_loss(diffusion_nft, make_rows(dtype=dtype), nft(beta=beta, kl_coef=0.3), nft_formula, tolerance)


def test_a_perfect_prediction_is_divided_by_the_floor():
    """Expects (1e-6)^2 / 1e-5 for the error 1e-6, since <|x - x0|> is below 1e-5."""
    zeros = torch.zeros(1, 2, 3, dtype=torch.float64)
    velocity = torch.full_like(zeros, 2e-6)
    sigma, advantage = torch.tensor([0.5], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)
    rows = ForwardInputs(velocity, zeros, zeros, sigma, advantage, old_velocity=velocity)
    assert diffusion_nft(rows, nft()).loss.item() == pytest.approx(5 * 1e-12 / 1e-5)


MODES = {
    "all": [0.0, 0.25, 0.5, 0.75, 1.0],
    "positive_only": [0.5, 0.5, 0.5, 0.75, 1.0],
    "negative_only": [0.0, 0.25, 0.5, 0.5, 0.5],
    "one_only": [0.5, 0.5, 0.5, 0.75, 0.75],
    "binary": [0.25, 0.25, 0.5, 0.75, 0.75],
}


@pytest.mark.parametrize("mode", MODES)
def test_preferences_by_hand(mode):
    advantage = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0])
    assert preference(advantage, 2.0, mode).tolist() == MODES[mode]
    rows = make_rows(5, dtype=torch.float32, advantage=advantage)
    assert diffusion_nft(rows, nft(mode=mode, clip_max=2.0)).metrics["preference"].tolist() == MODES[mode]


def test_metrics_of_diffusion_nft_by_hand():
    rows = make_rows()
    out = diffusion_nft(rows, nft(beta=0.5))
    assert out.metrics.keys() == {"preference", "positive_loss", "negative_loss", "old_deviation", "kl_ref"}
    r, positive, negative = (out.metrics[name] for name in ("preference", "positive_loss", "negative_loss"))
    torch.testing.assert_close(out.loss.detach(), 5 * (r * positive + (1 - r) * negative) / 0.5)
    close(out.metrics["old_deviation"], error(rows.velocity, rows.old_velocity))
    close(out.metrics["kl_ref"], error(rows.velocity, rows.ref_velocity))
    assert "kl_ref" not in diffusion_nft(make_rows(without=["ref_velocity"]), nft()).metrics


WEIGHTINGS = ("uniform", "sigma", "sigma_squared", "huber", "ghuber")
weightings = pytest.mark.parametrize("weighting", WEIGHTINGS)
ratios = pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])


def awm_of(*, kl_coef=0.0, clip_max=5.0, **changes):
    return Algorithm(kl_coef=kl_coef, advantage=Advantage(clip_max=clip_max), awm=Awm(**changes))


def awm_formula(rows, algorithm):
    """Computes the loss of advantage weighted matching with the settings' likelihood, ratio and pulls."""
    settings, a, sigma = algorithm.awm, algorithm.advantage.clip_max, rows.sigma

    def likelihood(velocity):
        off = error(velocity, rows.noise - rows.final)
        shifted, power = off + 1e-10, settings.power
        return {
            "uniform": -off,
            "sigma": -off * sigma,
            "sigma_squared": -off * sigma * sigma,
            "huber": -(shifted.sqrt() - 1e-5) * sigma,
            "ghuber": -(shifted**power - 1e-10**power) * sigma / power,
        }[settings.weighting]

    log_ratio = likelihood(rows.velocity) - likelihood(rows.old_velocity)
    if settings.ratio == "sum_first":
        log_ratio = log_ratio.view(-1, rows.draws).mean(1).repeat_interleave(rows.draws)
    ratio, clip = log_ratio.exp(), settings.clip_range
    advantage = rows.advantage.clamp(-a, a) * (1 if settings.advantage_max is None else settings.advantage_max / a)
    end = settings.ema_coef if settings.ema_coef_end is None else settings.ema_coef_end
    ema_coef = settings.ema_coef + (end - settings.ema_coef) * rows.progress
    pull = algorithm.kl_coef * error(rows.velocity, rows.ref_velocity)
    pull = pull + ema_coef * error(rows.velocity, rows.ema_velocity)
    if settings.kl_form == "elbo":
        pull = pull / (2 * 0.7**2 * sigma / (1 - sigma.clamp(max=0.99)))
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)) + pull


def sample_rows(**changes):
    """Makes two samples of three draws, each with one advantage."""
    changes.setdefault("advantage", torch.tensor([3.0] * 3 + [-7.0] * 3, dtype=changes.get("dtype", torch.float64)))
    return make_rows(draws=3, **changes)


@dtypes
@ratios
@weightings
@pytest.mark.parametrize(("kl_form", "advantage_max"), [("velocity", 0.5), ("elbo", None)])
def test_awm_is_its_formula(kl_form, advantage_max, weighting, ratio, dtype, tolerance):
    pulls = {"kl_coef": 0.2, "ema_coef": 1.0, "ema_coef_end": 0.3, "kl_form": kl_form}
    shape = {"weighting": weighting, "power": 0.3, "ratio": ratio, "clip_range": 0.4}
    algorithm = awm_of(**shape, **pulls, advantage_max=advantage_max)
    sigma = torch.tensor([1.0, 0.99, 0.7, 0.5, 0.3, 0.1], dtype=dtype)  # `elbo` takes 1 - sigma to be at least 0.01
    rows = sample_rows(dtype=dtype, progress=0.25, sigma=sigma)
    assert_same_loss(awm, rows, algorithm, awm_formula, tolerance)


@dtypes
@ratios
@weightings
def test_on_policy_awm_is_that_with_the_current_policy_as_the_old_one(weighting, ratio, dtype, tolerance):
    algorithm = awm_of(weighting=weighting, power=0.3, ratio=ratio)
    rows = sample_rows(dtype=dtype, without=["old_velocity"])
    out = awm(rows, algorithm)
    torch.testing.assert_close(out.loss, -rows.advantage.clamp(-5, 5) / 5, atol=tolerance, rtol=0)
    same = sample_rows(dtype=dtype, old_velocity=rows.velocity.detach())
    explicit = awm(same, algorithm)
    assert torch.equal(out.loss, explicit.loss)
    assert torch.equal(per_row_gradient(out.loss, rows), per_row_gradient(explicit.loss, same))


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "clipped"),
    [(5.0, 0.3, True), (5.0, -0.3, False), (-5.0, 0.3, False), (-5.0, -0.3, True), (5.0, 0.1, False)],
)
def test_the_clip_stops_the_gradient_only_where_the_surrogate_would_improve(advantage, log_ratio, clipped):
    """Sets target 0, velocity 1 everywhere: p = -1 under `uniform`, and old_velocity sqrt(1 + l) has p - p_old = l."""
    zeros = torch.zeros(1, 2, 3, dtype=torch.float64)
    velocity, one = torch.ones_like(zeros).requires_grad_(), torch.ones(1, dtype=torch.float64)
    old = torch.full_like(zeros, math.sqrt(1 + log_ratio))
    rows = ForwardInputs(velocity, zeros, zeros, 0.5 * one, advantage * one, old)
    out = awm(rows, awm_of(weighting="uniform", clip_range=0.2))
    ratio = math.exp(log_ratio)
    assert out.loss.item() == pytest.approx(-advantage / 5 * (min(max(ratio, 0.8), 1.2) if clipped else ratio))
    expected = 0.0 if clipped else advantage / 5 * ratio * 2 / 6
    torch.testing.assert_close(per_row_gradient(out.loss, rows), torch.full_like(zeros, expected))
    assert out.metrics["ratio_deviation"].item() == pytest.approx(abs(ratio - 1))
    assert out.metrics["approx_kl"].item() == pytest.approx(log_ratio**2 / 2)
    assert out.metrics["clipped_high"].item() == (ratio > 1.2)
    assert out.metrics["clipped_low"].item() == (ratio < 0.8)


@weightings
def test_the_likelihood_is_greatest_and_finite_where_there_is_no_error(weighting):
    error = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value = log_likelihood(error, torch.full((1,), 0.5, dtype=torch.float64), Awm(weighting=weighting))
    assert value.item() == pytest.approx(0.0, abs=1e-18)
    value.backward()
    assert error.grad.isfinite().all() and error.grad < 0


def test_metrics_of_awm_are_absent_without_their_velocities():
    metrics = awm(sample_rows(), awm_of(kl_coef=0.1, ema_coef=0.1)).metrics
    rows = sample_rows(without=["ref_velocity", "ema_velocity"])
    fewer = awm(rows, awm_of()).metrics
    assert metrics.keys() - fewer.keys() == {"kl_ref", "kl_ema"}
    close(fewer["flow_error"], error(rows.velocity, rows.noise - rows.final))


LOSSES = ("sigmoid", "hinge", "ipo")


def dpo(**changes):
    return Algorithm(dpo=Dpo(**changes))


def gaps(rows):
    """Returns the errors, and by how much that of each row's winner grew more than its loser's."""
    aim = rows.noise - rows.final
    errors = error(rows.velocity, aim)
    gain = errors - error(rows.ref_velocity, aim)
    return errors, (gain[::2] - gain[1::2]).repeat_interleave(2)


def dpo_formula(rows, algorithm):
    settings = algorithm.dpo
    strength, z = settings.beta / 2 if settings.halved else settings.beta, -gaps(rows)[1]
    return {
        "sigmoid": (-strength * z).exp().log1p(),
        "hinge": (1 - strength * z).clamp(min=0),
        "ipo": (z - 1 / (2 * strength)) ** 2,
    }[settings.loss]


@dtypes
@pytest.mark.parametrize("halved", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_diffusion_dpo_is_its_formula(loss, halved, dtype, tolerance):
    algorithm = dpo(loss=loss, halved=halved, beta=0.7)
    assert_same_loss(diffusion_dpo, make_pairs(dtype=dtype), algorithm, dpo_formula, tolerance)


def test_saturated_pairs_stay_finite():
    rows = make_pairs(dtype=torch.float32)
    out = diffusion_dpo(rows, dpo(beta=1e6))
    assert out.loss.isfinite().all()
    assert per_row_gradient(out.loss, rows).isfinite().all()
    wrong = gaps(rows)[1] > 0
    assert 0 < wrong.sum() < 6
    assert (out.loss[~wrong] == 0).all()
    torch.testing.assert_close(out.loss[wrong], -out.metrics["margin"][wrong])


def test_metrics_of_diffusion_dpo_by_hand():
    rows = make_pairs()
    metrics = diffusion_dpo(rows, dpo(beta=3.0)).metrics
    errors, gap = gaps(rows)
    expected = {
        "margin": -1.5 * gap,
        "accuracy": gap < 0,
        "winner_error": errors[::2].repeat_interleave(2),
        "loser_error": errors[1::2].repeat_interleave(2),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        close(metrics[name], value)
    assert 0 < metrics["accuracy"].sum() < 6
    at_the_reference = diffusion_dpo(replace(rows, ref_velocity=rows.velocity.detach()), dpo())
    assert not at_the_reference.metrics["accuracy"].any() and not at_the_reference.metrics["margin"].any()


def missing(name):
    return make_rows(without=[f"{name}_velocity"])


def moved(name, *index):
    """Makes pairs of which one number is another."""
    value = getattr(make_pairs(), name).clone()
    value[index] += 1e-9
    return replace(make_pairs(), **{name: value})


@pytest.mark.parametrize(
    ("objective", "rows", "algorithm", "message"),
    [
        (diffusion_nft, missing("old"), nft(), "diffusion_nft needs old_velocity"),
        (diffusion_nft, missing("ref"), nft(kl_coef=0.1), "kl_coef is 0.1 but there is no ref_velocity"),
        (awm, missing("ref"), awm_of(kl_coef=0.1), "kl_coef is 0.1 but there is no ref_velocity"),
        (awm, missing("ema"), awm_of(ema_coef=0.1), "ema_coef is 0.1 and ema_coef_end None, but .* no ema_velocity"),
        (awm, missing("ema"), awm_of(ema_coef_end=0.3), "ema_coef is 0.0 and ema_coef_end 0.3, but .* no ema_velocity"),
        (awm, missing("old"), awm_of(off_policy=True), "awm.off_policy is set but there is no old_velocity"),
        (awm, make_rows(progress=1.5), awm_of(), r"progress must be in \[0, 1\], got 1.5"),
        (diffusion_dpo, missing("ref"), dpo(), "diffusion_dpo needs ref_velocity"),
        (diffusion_dpo, make_rows(3), dpo(), "odd number of rows, 3"),
        (diffusion_dpo, moved("noise", 3, 1, 2), dpo(), r"noise .* differs in pair 1 \(rows 2, 3\)"),
        (diffusion_dpo, moved("sigma", 5), dpo(), r"sigma .* pair 2"),
    ],
)
def test_missing_velocities_and_rows_that_are_no_pairs_are_named(objective, rows, algorithm, message):
    with pytest.raises(ValueError, match=message):
        objective(rows, algorithm)


SCHEDULE = torch.tensor([1.0, 0.9, 0.75, 0.6, 0.4, 0.02, 0.0])


def generator_of(seed):
    return np.random.default_rng(seed)


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


def test_number_of_draws():
    """Takes a fraction of the sigmas to draw from, rounded down, unless the number is given."""
    assert [num_draws(10, Forward(), fraction) for fraction in (1.0, 0.6, 0.69, 0.01)] == [10, 6, 6, 1]
    assert [num_draws(10, Forward(sigmas="schedule_wo_first"), fraction) for fraction in (1.0, 0.5)] == [9, 4]
    assert num_draws(10, Forward(sigmas="logit_normal"), 0.5) == 5
    assert (num_draws(10, Forward(draws=3), 1.0), num_draws(10, Forward(draws=25), 0.1)) == (3, 25)


@given(
    steps=st.integers(2, 30),
    draws=st.none() | st.integers(1, 70),
    fraction=st.floats(0.01, 1.0),
    kind=st.sampled_from(["schedule", "schedule_wo_first", "logit_normal"]),
)
@searched(max_examples=50, deadline=None)
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


def test_logit_normal_strata_come_in_random_order_and_never_below_a_hundredth():
    forward = Forward(draws=3, sigmas="logit_normal")
    orders = {tuple(draw_sigmas(SCHEDULE, forward, 1.0, generator_of(seed)).argsort().tolist()) for seed in range(60)}
    assert len(orders) == 6
    many = Forward(draws=1000, sigmas="logit_normal", shift=0.2)  # the first thousandth lies below before the clamp
    assert draw_sigmas(SCHEDULE, many, 1.0, generator_of(0)).min().item() == pytest.approx(0.01, abs=1e-8)


def test_impossible_draws_are_refused():
    with pytest.raises(ValueError, match="num_inference_steps must be >= 1, got 0"):
        num_draws(0, Forward(), 1.0)
    with pytest.raises(ValueError, match="leaves nothing of a schedule of 1 step"):
        draw_sigmas(torch.tensor([1.0, 0.0]), Forward(draws=2, sigmas="schedule_wo_first"), 1.0, generator_of(0))
    with pytest.raises(ValueError, match=r"end in 0, got shape \(2,\): \[1.0, 0.5\]"):
        draw_sigmas(torch.tensor([1.0, 0.5]), Forward(), 1.0, generator_of(0))
