"""Tests every objective on transitions against its formula, and what all have in common."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings as searched
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from omni_async.algorithms.objectives.base import TransitionInputs
from omni_async.algorithms.objectives.transition import (
    clipped_log_ratios,
    clipped_surrogate,
    dance_grpo,
    distill,
    flow_dppo,
    flow_grpo,
    grpo_guard,
    gspo,
    log_ratios,
    mix_grpo,
    objective_output,
    reinforce,
)
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Algorithm, Correction, Dppo, Guard, Mix, Teacher
from omni_async.diffusion.sde.transitions import log_prob, take_step, transition

SHAPE = (3, 4)
D = 12
ROWS = 24
kinds = pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
kl_coefs = pytest.mark.parametrize("kl_coef", [0.0, 0.3])


def inputs(ratios, advantages, dtype=torch.float64, **changes):
    """Makes rows of 6 elements with these ratios to an old log-prob of 0; std 0.5, scale 0.2."""
    count = len(ratios)
    given = TransitionInputs(
        log_prob=torch.tensor(ratios, dtype=dtype).log().requires_grad_(),
        old_log_prob=torch.zeros(count, dtype=dtype),
        advantage=torch.tensor(advantages, dtype=dtype),
        mean=torch.zeros(count, 2, 3, dtype=dtype),
        old_mean=None,
        std=torch.full((count,), 0.5, dtype=dtype),
        scale=torch.full((count,), 0.2, dtype=dtype),
        nats_per_log_prob=torch.full((count,), 6.0, dtype=torch.float64),
        ref_mean=None,
        num_elements=6,
        kind="flow",
    )
    return replace(given, **changes)


def make_rows(kind="flow", rows=ROWS, seed=0, drift=0.3, each=1, **changes):
    """Makes rows of random float64 steps, `each` a sample, whose velocity has moved by `drift` since they were taken.
    log_prob and mean are leaves that want a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, number=rows):
        return low + (high - low) * torch.rand(number, generator=generator, dtype=torch.float64)

    x, old_velocity, noise = normal(rows, *SHAPE), normal(rows, *SHAPE), normal(rows, *SHAPE)
    sigma, level = uniform(0.4, 0.95), uniform(0.4, 0.9)
    at = (sigma, sigma * uniform(0.7, 0.9), torch.full_like(sigma, 0.97), level)
    x_next, _, _ = take_step(kind, x, old_velocity, *at, noise)
    velocities = (
        old_velocity + drift * normal(rows, *SHAPE),
        old_velocity,
        old_velocity + drift * normal(rows, *SHAPE),
    )
    current, old, ref = (transition(kind, x, velocity, *at) for velocity in velocities)
    given = TransitionInputs(
        log_prob=log_prob(kind, x_next, current.mean, current.scale).requires_grad_(),
        old_log_prob=log_prob(kind, x_next, old.mean, old.scale),
        advantage=normal(rows // each).repeat_interleave(each),
        mean=current.mean.requires_grad_(),
        old_mean=old.mean,
        std=current.std,
        scale=current.scale,
        nats_per_log_prob=D / (2 * current.scale**2) if kind == "cps" else torch.full_like(current.scale, D),
        ref_mean=ref.mean,
        num_elements=D,
        kind=kind,
        steps_per_sample=each,
        weight=uniform(0.0, 1.0, rows // each).repeat_interleave(each),
    )
    return replace(given, **changes)


def ratio_of(given, each=1):
    """Returns exp of the mean log-ratio of the `each` rows of a sample."""
    return (given.log_prob - given.old_log_prob).view(-1, each).mean(1).repeat_interleave(each).exp()


def error(a, b):
    return (a - b).square().flatten(1).mean(1)


def surrogate(given, ratio, clip):
    """Returns PPO's loss of every row; the clip holds some rows."""
    free, bound = -given.advantage * ratio, -given.advantage * ratio.clamp(1 - clip, 1 + clip)
    assert 0 < (bound > free).sum() < len(free)
    return torch.maximum(free, bound)


def kl(given, exact=False):
    return error(given.mean, given.ref_mean) / (2 * (given.scale if exact else given.std) ** 2)


def close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


@kinds
@kl_coefs
@pytest.mark.parametrize("exact", [False, True])
def test_flow_grpo_and_mix_grpo_and_dance_grpo(kind, kl_coef, exact):
    clip = 0.002 if kind == "cps" else 0.02
    given = make_rows(kind)
    settings = {"clip_range": clip, "kl_form": "exact" if exact else "published"}
    losses = given.weight * surrogate(given, ratio_of(given), clip)
    expected = losses + kl_coef * kl(given, exact)
    close(flow_grpo(given, Algorithm(kl_coef=kl_coef, **settings)).loss, expected)
    mixed = mix_grpo(given, Algorithm(kl_coef=kl_coef, mix=Mix(log_ratio_coef=5.0), **settings))
    close(mixed.loss, expected + 5.0 * ratio_of(given).log() ** 2 / 2)
    close(dance_grpo(given, Algorithm(**settings)).loss, losses)


def test_the_default_clip_range_is_flow_grpos():
    given = make_rows(drift=1e-3)
    assert torch.equal(flow_grpo(given, Algorithm()).loss, flow_grpo(given, Algorithm(clip_range=1e-4)).loss)
    assert 0 < float(flow_grpo(given, Algorithm()).metrics["clipped_high"].sum()) < ROWS


@kl_coefs
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("scale", ["batch", "sample"])
def test_grpo_guard(scale, divide, kl_coef):
    given = make_rows(seed=4)
    out = grpo_guard(given, Algorithm(clip_range=0.01, kl_coef=kl_coef, guard=Guard(scale=scale, divide=divide)))
    root_h, std = given.scale / given.std, given.std
    if scale == "batch":
        root_h, std = root_h.mean().expand(ROWS), std.mean().expand(ROWS)
    width = root_h * std
    bias = error(given.mean, given.old_mean) / (2 * width**2)
    ratio = (ratio_of(given) * bias.exp()) ** width
    losses = given.weight * surrogate(given, ratio, 0.01) / (root_h**2 if divide else 1)
    close(out.loss, losses + kl_coef * kl(given))
    close(out.metrics["guard_bias"], bias)
    close(out.metrics["ratio_deviation"], (ratio - 1).abs())
    close(out.metrics["approx_kl"], ratio_of(given).log() ** 2 / 2)


@kinds
@kl_coefs
@pytest.mark.parametrize("width", ["transition", "unit"])
def test_flow_dppo(kind, width, kl_coef):
    given = make_rows(kind, seed=6, rows=40)
    ratio, kappa = ratio_of(given), error(given.mean, given.old_mean) / 2
    kappa = kappa / given.scale**2 if width == "transition" else kappa
    limit = kappa.sort().values[20].item() * (1 - 1e-9)
    dropped = (kappa >= limit) & (given.advantage * (ratio - 1) > 0)
    out = flow_dppo(given, Algorithm(kl_coef=kl_coef, dppo=Dppo(kappa_max=limit, width=width)))
    assert 0 < dropped.sum() < 20
    close(out.loss, given.weight * ~dropped * -given.advantage * ratio + kl_coef * kl(given))
    assert torch.equal(out.metrics["dropped"], dropped.double())
    assert out.metrics.keys() == {"ratio_deviation", "dropped", "approx_kl", "kl_ref"}


@pytest.mark.parametrize(
    ("dppo", "drops"),
    [
        (Dppo(kappa_max=0.124), True),
        (Dppo(kappa_max_nats=6 * 0.126, kappa_max=1e-9), False),
        (Dppo(kappa_max_nats=6 * 0.124, kappa_max=1e9), True),
    ],
)
def test_flow_dppo_drops_rows_beyond_the_limit_only_where_they_move_away(dppo, drops):
    """Takes rows of kappa 0.01 / (2 0.2^2) = 0.125; neither ratio nor advantage is clipped."""
    ratios, advantages = [1.3, 0.7, 1.3, 0.7, 1.0, 1.3], [20.0, 2.0, -2.0, -2.0, 2.0, 0.0]
    given = inputs(ratios, advantages, old_mean=torch.full((6, 2, 3), 0.1, dtype=torch.float64))
    out = flow_dppo(given, Algorithm(dppo=dppo, clip_range=1e-4))
    close(out.loss, [0.0 if drops else -26.0, -1.4, 2.6, 0.0 if drops else 1.4, -2.0, 0.0])
    assert out.metrics["dropped"].tolist() == ([1, 0, 0, 1, 0, 0] if drops else [0] * 6)
    at_the_limit = inputs([1.3], [1.0], old_mean=torch.full((1, 2, 3), 0.5, dtype=torch.float64))  # 0.5^2 / 2, exactly
    dppo = Dppo(kappa_max=0.125, width="unit")
    assert flow_dppo(at_the_limit, Algorithm(dppo=dppo)).metrics["dropped"].item() == 1


@kl_coefs
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_gspo(kind, each, kl_coef):
    given = make_rows(kind, seed=8, each=each)
    ratio = ratio_of(given, each)
    out = gspo(given, Algorithm(clip_range=0.01, kl_coef=kl_coef))
    close(out.loss, given.weight * surrogate(given, ratio, 0.01) + kl_coef * kl(given))
    close(out.metrics["ratio_deviation"], (ratio - 1).abs())
    close(out.metrics["approx_kl"], ratio_of(given).log() ** 2 / 2)


@kinds
@pytest.mark.parametrize(("objective", "each"), [(flow_grpo, 1), (gspo, 3)])
def test_a_clip_range_in_nats_bounds_the_mean_over_steps_of_whole_sample_log_ratios(objective, each, kind):
    """Counts steps of `cps` by their densities, although their log-probs lack a factor."""
    given = make_rows(kind, seed=3, each=each)
    nats = given.nats_per_log_prob * (given.log_prob - given.old_log_prob)
    average = nats.view(-1, each).mean(1).repeat_interleave(each)
    outside = (average.abs() > 0.2) & (given.advantage * average > 0)
    assert 0 < outside.sum() < ROWS
    log_ratio = ratio_of(given, each).log() * torch.where(outside, 0.2 / average.abs(), 1)
    loss = objective(given, Algorithm(clip_range_nats=0.2)).loss
    close(loss, given.weight * -given.advantage * log_ratio.exp())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(1, 1)}, r"log_prob must have shape \(R,\), got \(1, 1\)"),
        ({"old_log_prob": torch.zeros(2)}, r"old_log_prob must have shape \(1,\).*got \(2,\)"),
        ({"weight": torch.zeros(())}, r"weight must have shape \(1,\).*got \(\)"),
        ({"num_elements": 5}, r"1 rows of 5 elements, got shape \(1, 2, 3\)"),
        ({"old_mean": torch.zeros(2, 2, 3)}, r"old_mean must have shape \(1, 2, 3\).*got \(2, 2, 3\)"),
        ({"steps_per_sample": 2}, "1 rows are not whole samples of 2 steps"),
        ({"steps_per_sample": 0}, "1 rows are not whole samples of 0 steps"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        inputs([1.0], [1.0], **change)


def clipped(given, algorithm):
    return clipped_surrogate(given.advantage, algorithm, log_ratios(given), *clipped_log_ratios(given, algorithm))


def test_tiny_clip_ranges_work_in_float32():
    given = inputs([1.0, 1.0], [1.0, 1.0], torch.float32, log_prob=torch.tensor([0.9e-6, 1.1e-6]))
    assert clipped(given, Algorithm(clip_range=1e-6))[1]["clipped_high"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("objective", "kind", "changes", "algorithm", "message"),
    [
        (dance_grpo, "dance", {}, Algorithm(kl_coef=0.04), r"algorithm\.kl_coef: dance_grpo has no KL term, got 0\.04"),
        (grpo_guard, "cps", {}, Algorithm(), "'flow' alone; got 'cps'"),
        (grpo_guard, "dance", {}, Algorithm(), "'flow' alone; got 'dance'"),
        (grpo_guard, "flow", {"old_mean": None}, Algorithm(), "grpo_guard needs old_mean"),
        (flow_dppo, "flow", {"old_mean": None}, Algorithm(), "flow_dppo needs old_mean"),
        (gspo, "flow", {"old_mean": None}, Algorithm(clip_centre="drift"), "clip_centre drift needs old_mean"),
        (gspo, "flow", {"ref_mean": None}, Algorithm(kl_coef=0.7), r"kl_coef is 0\.7 but there is no ref_mean"),
    ],
)
def test_what_an_objective_cannot_use_is_refused(objective, kind, changes, algorithm, message):
    with pytest.raises(ValueError, match=message):
        objective(make_rows(kind, **changes), algorithm)


def test_a_clip_range_is_given_once_and_in_nats_only_where_the_log_ratio_is_one_of_densities():
    given = inputs([1.0], [1.0])
    with pytest.raises(ValueError, match=r"not both \(got 0.0001 and 0.5\)"):
        clipped(given, Algorithm(clip_range=1e-4, clip_range_nats=0.5))
    with pytest.raises(ValueError, match=r"clip_range_nats: the ratio of grpo_guard is rescaled.*use clip_range"):
        guard = Algorithm(name="grpo_guard", clip_range_nats=0.5)
        clipped_surrogate(given.advantage, guard, log_ratios(given), log_ratios(given), None)


PAIR = (0.01, 0.03)


@kinds
@pytest.mark.parametrize(("objective", "each"), [(flow_grpo, 1), (mix_grpo, 1), (gspo, 3)])
def test_a_pair_clips_each_side_at_its_own_end(objective, each, kind):
    """Compares with DAPO's surrogate, eq. 10, on both sides of 1."""
    low, high = PAIR if kind == "flow" else (0.002, 0.006)
    given = make_rows(kind, each=each, drift=0.5)
    ratio = ratio_of(given, each)
    out = objective(given, Algorithm(clip_range=(low, high)))
    close(
        out.loss,
        -given.weight * torch.minimum(given.advantage * ratio, given.advantage * ratio.clamp(1 - low, 1 + high)),
    )
    for name, outside in (("clipped_low", ratio < 1 - low), ("clipped_high", ratio > 1 + high)):
        assert torch.equal(out.metrics[name], outside.double())
        assert 0 < outside.sum() < ROWS


def test_equal_ends_are_the_scalar_to_the_bit_and_guard_takes_a_pair():
    given = make_rows()
    for key, objective in (("clip_range", flow_grpo), ("clip_range_nats", flow_grpo), ("clip_range", grpo_guard)):
        one, pair = (objective(given, Algorithm(**{key: value})) for value in (0.1, (0.1, 0.1)))
        assert torch.equal(one.loss, pair.loss)
    sides = [grpo_guard(given, Algorithm(clip_range=one)).metrics for one in ((1e-3, 9.0), (9.0, 1e-3))]
    assert [bool(m[name].any()) for m in sides for name in ("clipped_low", "clipped_high")] == [
        True,
        False,
        False,
        True,
    ]


@kinds
def test_a_pair_in_nats_bounds_both_sides_of_l(kind):
    given = make_rows(kind, seed=3)
    nats, A = given.nats_per_log_prob * (given.log_prob - given.old_log_prob), given.advantage
    low, high = 0.1, 0.3
    ratio = (nats.clamp(-low, high) / given.nats_per_log_prob).exp()
    expected = torch.minimum(A * ratio_of(given), A * ratio)
    out = flow_grpo(given, Algorithm(clip_range_nats=(low, high)))
    close(out.loss, -given.weight * expected)
    assert torch.equal(out.metrics["clipped_low"], (nats < -low).double())
    assert torch.equal(out.metrics["clipped_high"], (nats > high).double())
    assert ((nats > low) & (nats < high)).any() and (nats > high).any() and (nats < -low).any()


def test_dual_clip_bounds_the_loss_of_bad_samples_at_c_times_the_advantage():
    """Compares with arXiv 1912.09729: max(min(r A, clip(r) A), c A) where A < 0."""
    ratios, advantages = [0.5, 1.0, 1.1, 2.9, 3.1, 20.0] * 2, [-2.0] * 6 + [2.0] * 6
    given = inputs(ratios, advantages)
    out = flow_grpo(given, Algorithm(clip_range=0.2, dual_clip=3.0))
    r, A = torch.tensor(ratios, dtype=torch.float64), given.advantage
    plain = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    close(out.loss, -torch.where(A < 0, torch.maximum(plain, 3 * A), plain))
    assert out.metrics["dual_clipped"].tolist() == [0, 0, 0, 0, 1, 1] + [0] * 6
    [gradient] = torch.autograd.grad(out.loss.sum(), given.log_prob)
    assert (gradient != 0).tolist() == [False, True, True, True, False, False, True, True, True, False, False, False]
    assert "dual_clipped" not in flow_grpo(given, Algorithm(clip_range=0.2)).metrics


def test_dual_clip_in_nats_bounds_the_ratio_of_whole_samples():
    """Takes ratios per element whose sixth powers are 2.9 and 3.1: the ratios of 6 elements."""
    given = inputs([2.9 ** (1 / 6), 3.1 ** (1 / 6)] * 2, [-1.0, -1.0, 1.0, 1.0])
    out = flow_grpo(given, Algorithm(clip_range_nats=9.0, dual_clip=3.0))
    close(out.loss, [2.9 ** (1 / 6), 3.0 ** (1 / 6), -(2.9 ** (1 / 6)), -(3.1 ** (1 / 6))])
    assert out.metrics["dual_clipped"].tolist() == [0, 1, 0, 0]


def gaussian_steps(kappa_nats, rows=20_000, kind="flow"):
    """Makes steps that the old policy took, whose mean has moved by this KL in nats, with A of both signs in turn."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    scale = torch.where(torch.arange(rows) % 4 < 2, 0.2, 0.05).double()
    old_mean = torch.zeros(rows, D, dtype=torch.float64)
    mean = torch.full((rows, D), (2 * kappa_nats / D) ** 0.5, dtype=torch.float64) * scale[:, None]
    x = scale[:, None] * noise
    return TransitionInputs(
        log_prob=log_prob(kind, x, mean, scale).requires_grad_(),
        old_log_prob=log_prob(kind, x, old_mean, scale),
        advantage=torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows // 2),
        mean=mean.requires_grad_(),
        old_mean=old_mean,
        std=scale,
        scale=scale,
        nats_per_log_prob=D / (2 * scale**2) if kind == "cps" else torch.full_like(scale, D),
        ref_mean=None,
        num_elements=D,
        kind=kind,
    )


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


@kinds
def test_a_clip_centred_on_the_drift_takes_as_many_good_rows_as_bad_ones(kind):
    """Compares with the tails of L ~ N(-D kappa, 2 D kappa) at D kappa = 1 beyond 1 nat."""
    given = gaussian_steps(1.0, kind=kind)
    good = given.advantage > 0
    tails = {"zero": (1 - normal_cdf(2 / 2**0.5), normal_cdf(0)), "drift": (1 - normal_cdf(1 / 2**0.5),) * 2}
    assert [round(tail, 2) for tail in (*tails["zero"], *tails["drift"])] == [0.08, 0.5, 0.24, 0.24]
    for centre, (of_good, of_bad) in tails.items():
        out = flow_grpo(given, Algorithm(clip_range_nats=1.0, clip_centre=centre))
        [gradient] = torch.autograd.grad(out.loss.sum(), given.log_prob)
        masked = (gradient == 0).double()
        for rows, tail in ((good, of_good), (~good, of_bad)):
            assert masked[rows].mean().item() == pytest.approx(tail, abs=4 * (tail * (1 - tail) / 10_000) ** 0.5)
        free = gradient != 0
        close(out.loss[free], (-given.advantage * ratio_of(given))[free])  # the ratio is not moved


@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_the_centre_per_element_is_that_in_nats(kind):
    """Takes ranges c and log(1 +- c) D, which hold the same rows."""
    given = make_rows(kind, drift=0.5)
    c = 0.02
    pair = (-D * math.log(1 - c), D * math.log(1 + c))
    one, nats = (
        flow_grpo(given, Algorithm(clip_centre="drift", **{k: v}))
        for k, v in (("clip_range", c), ("clip_range_nats", pair))
    )
    close(one.loss, nats.loss)
    centred = log_ratios(given) + error(given.mean, given.old_mean) / (2 * given.scale**2)
    assert torch.equal(one.metrics["clipped_high"], (centred.exp() > 1 + c).double())
    plain = flow_grpo(given, Algorithm(clip_range=c)).metrics
    assert any(not torch.equal(one.metrics[name], plain[name]) for name in ("clipped_low", "clipped_high"))


KEPT = Correction(mode="decoupled", k3=1.0, steps="kept")


@pytest.mark.parametrize("nats", [False, True])
def test_gspo_over_kept_steps_takes_the_mean_over_the_steps_of_positive_weight(nats):
    """Leaves 3, 2, 1 and 0 steps of a sample, and compares with gspo on the kept steps alone, a sample at a time."""
    given = make_rows(rows=12, each=3, seed=2)
    weight = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.5, 1.0], [0.0, 0.7, 0.0], [0.0, 0.0, 0.0]]).double()
    given = replace(given, weight=weight.flatten())
    clip = {"clip_range_nats": 0.1} if nats else {"clip_range": 0.01}
    out = gspo(given, Algorithm(correction=KEPT, **clip))
    [gradient] = torch.autograd.grad(out.loss.sum(), given.log_prob)
    for sample, weights in enumerate(weight):
        rows = [3 * sample + n for n in range(3) if weights[n] > 0]
        if not rows:
            assert not gradient[3 * sample :].any() and not out.loss[3 * sample :].any()
            continue
        values = {name: value[rows] for name, value in tensors(given).items()}
        alone = replace(given, **values, steps_per_sample=len(rows))
        leaf = alone.log_prob.requires_grad_()
        expected = gspo(alone, Algorithm(**clip))
        close(out.loss[rows], expected.loss)
        close(gradient[rows], torch.autograd.grad(expected.loss.sum(), leaf)[0])
        assert torch.equal(out.metrics["clipped_low"][rows], expected.metrics["clipped_low"])
    whole = gspo(replace(given, weight=torch.ones(12).double()), Algorithm(correction=KEPT, **clip))
    close(whole.loss, gspo(replace(given, weight=None), Algorithm(**clip)).loss, 1e-14)


@kl_coefs
def test_reinforce_is_the_weighted_score_and_flow_grpos_gradient_on_policy(kl_coef):
    given = make_rows()
    out = reinforce(given, Algorithm(kl_coef=kl_coef))
    close(out.loss, -given.weight * given.advantage * given.log_prob + kl_coef * kl(given))
    [gradient] = torch.autograd.grad(out.loss.sum(), given.log_prob, retain_graph=True)
    close(gradient, -given.weight * given.advantage)
    on_policy = replace(given, old_log_prob=given.log_prob.detach(), weight=None)
    of_ppo, of_score = (
        torch.autograd.grad(objective(on_policy, Algorithm()).loss.sum(), given.log_prob)[0]
        for objective in (flow_grpo, reinforce)
    )
    close(of_score, of_ppo)


@pytest.mark.parametrize(("form", "divisor"), [("published", 2 * 0.5**2), ("exact", 2 * 0.2**2), ("mean", 1.0)])
def test_each_kl_form_by_hand(form, divisor):
    mean, ref = (torch.full((1, 2, 3), value, dtype=torch.float64) for value in (0.3, 0.1))
    given = inputs([1.0], [0.0], mean=mean, ref_mean=ref)
    out = objective_output(given, Algorithm(kl_coef=0.5, kl_form=form), torch.zeros(1, dtype=torch.float64), {})
    close(out.loss, [0.5 * 0.04 / divisor])
    close(out.metrics["kl_ref"], [0.04 / divisor])


TAUGHT = Algorithm(name="distill", teacher=Teacher(path="teacher", coef=1.7), kl_form="exact")


def taught_rows(kind="flow", **changes):
    """Makes rows whose teacher is another policy than the reference."""
    given = make_rows(kind, **changes)
    noise = torch.randn(given.mean.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return replace(given, teacher_mean=given.mean.detach() + 0.1 * noise)


@kinds
@pytest.mark.parametrize("form", ["exact", "published"])
def test_distill_is_the_kl_of_two_gaussians_per_element_and_its_gradient_is_known(kind, form):
    given = taught_rows(kind)
    width = (given.scale if form == "exact" else given.std)[:, None, None]
    policy, teacher = (torch.distributions.Normal(mean, width) for mean in (given.mean, given.teacher_mean))
    expected = torch.distributions.kl_divergence(policy, teacher).flatten(1).sum(1) / D
    out = distill(given, changed(TAUGHT, kl_form=form))
    close(out.loss, 1.7 * expected)
    close(out.metrics["kl_teacher"], expected)
    assert out.metrics.keys() == {"approx_kl", "kl_teacher", "kl_ref"}
    leaves = {name: value.requires_grad_() for name, value in tensors(given).items()}
    distill(replace(given, **leaves), changed(TAUGHT, kl_form=form)).loss.sum().backward()
    close(leaves["mean"].grad, 1.7 * (given.mean - given.teacher_mean) / (D * width**2))
    assert {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()} == {"mean"}


def test_distill_pulls_to_the_reference_too_and_a_teacher_like_the_policy_teaches_nothing():
    given = taught_rows()
    both = distill(given, changed(TAUGHT, kl_coef=0.3)).loss
    close(both, distill(given, TAUGHT).loss + 0.3 * kl(given, exact=True))
    same = distill(replace(given, teacher_mean=given.mean.detach()), TAUGHT)
    assert not same.loss.any() and not same.metrics["kl_teacher"].any()


def test_distill_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"teacher\.coef is 1\.7 but there is no teacher_mean to compute the KL to"):
        distill(make_rows(), TAUGHT)


CASES = {
    "flow_grpo": Algorithm(name="flow_grpo", clip_range=0.02),
    "flow_grpo/nats": Algorithm(name="flow_grpo", clip_range_nats=0.3),
    "dance_grpo": Algorithm(name="dance_grpo", clip_range=0.02),
    "mix_grpo": Algorithm(name="mix_grpo", clip_range=0.02),
    "grpo_guard/batch": Algorithm(name="grpo_guard", clip_range=0.01),
    "grpo_guard/sample": Algorithm(name="grpo_guard", clip_range=0.01, guard=Guard(scale="sample", divide=False)),
    "flow_dppo": Algorithm(name="flow_dppo", dppo=Dppo(kappa_max=0.01)),
    "gspo": Algorithm(name="gspo", clip_range=0.01),
    "gspo/nats": Algorithm(name="gspo", clip_range_nats=0.12),
    "flow_grpo/pair": Algorithm(name="flow_grpo", clip_range=(0.02, 0.01)),
    "flow_grpo/dual": Algorithm(name="flow_grpo", clip_range=0.02, dual_clip=1.03),
    "gspo/centred": Algorithm(name="gspo", clip_range_nats=(0.12, 0.1), clip_centre="drift", dual_clip=1.2),
    "gspo/kept": Algorithm(name="gspo", clip_range=0.01, correction=Correction(mode="decoupled", k3=1.0, steps="kept")),
    "reinforce": Algorithm(name="reinforce"),
}
WITH_KL = sorted(CASES.keys() - {"dance_grpo"})


def of_two_steps(rows=ROWS, **changes):
    return make_rows(rows=rows, seed=11, each=2, **changes)


def compute(algorithm):
    return find_objective(algorithm.name).load()


def loss_and_gradient(algorithm, factor=1.0):
    """Returns the losses for this multiple of the advantages, and the gradient of their sum."""
    given = of_two_steps()
    given = replace(given, advantage=factor * given.advantage)
    loss = compute(algorithm)(given, algorithm).loss
    return loss, torch.autograd.grad(loss.sum(), (given.log_prob, given.mean), materialize_grads=True)


def with_kl(case):
    return changed(CASES[case], kl_coef=0.1 if case in WITH_KL else 0.0)


def tensors(given, dtype=torch.float64):
    """Returns every tensor of the inputs by name, cut off from the graph."""
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    return {name: value.detach().to(dtype) for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("case", WITH_KL)
def test_a_teacher_adds_its_kl_which_no_weight_multiplies(case):
    given, taught = taught_rows(each=2), changed(CASES[case], teacher=TAUGHT.teacher)
    added = compute(taught)(given, taught).loss - compute(CASES[case])(given, CASES[case]).loss
    close(added, 1.7 * error(given.mean, given.teacher_mean) / (2 * given.std**2))
    assert not find_objective(taught.name).homogeneous(taught)


def test_every_transition_objective_is_covered_here():
    assert {o.name for o in BUILT_IN if o.kind == "transition"} == {algorithm.name for algorithm in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_with_respect_to_log_prob_and_mean_is_the_numerical_one(case):
    algorithm = changed(with_kl(case), mix=Mix(log_ratio_coef=0.3))
    given = of_two_steps(rows=6)

    def loss(log_prob, mean):
        return compute(algorithm)(replace(given, log_prob=log_prob, mean=mean), algorithm).loss

    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in (given.log_prob, given.mean)))


@pytest.mark.parametrize("case", CASES)
def test_everything_but_log_prob_and_mean_is_data(case):
    given = of_two_steps()
    leaves = {name: value.requires_grad_() for name, value in tensors(given).items()}
    compute(CASES[case])(replace(given, **leaves), with_kl(case)).loss.sum().backward()
    reached = {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()}
    assert reached == ({"log_prob", "mean"} if case in WITH_KL else {"log_prob"})


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_with_float64_on_both_sides_of_the_trust_region(case):
    algorithm = with_kl(case)
    given = of_two_steps()
    results = []
    for dtype in (torch.float64, torch.float32):
        rows = tensors(given, dtype)
        leaves = rows["log_prob"].requires_grad_(), rows["mean"].requires_grad_()
        out = compute(algorithm)(replace(given, **rows), algorithm)
        assert (out.loss.shape, out.loss.dtype, out.loss.requires_grad) == ((24,), dtype, True)
        assert {"ratio_deviation", "approx_kl", "kl_ref"} <= out.metrics.keys()
        assert all((m.shape, m.dtype, m.requires_grad) == ((24,), dtype, False) for m in out.metrics.values())
        beyond = sum(out.metrics[name] for name in ("dropped", "clipped_low", "clipped_high") if name in out.metrics)
        assert algorithm.name == "reinforce" or 0 < beyond.sum() < len(beyond)
        results.append((out.loss, *torch.autograd.grad(out.loss.sum(), leaves, materialize_grads=True)))
    for exact, single in zip(*results, strict=True):
        close(single.double(), exact, 1e-5)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"grpo_guard/batch"}))
def test_a_sample_does_not_depend_on_its_batch(case):
    algorithm = with_kl(case)
    given = of_two_steps()
    rows = tensors(given, torch.float32)
    whole = compute(algorithm)(replace(given, **rows), algorithm)
    for start in range(0, 24, 2):
        own = slice(start, start + 2)
        alone = compute(algorithm)(replace(given, **{name: value[own] for name, value in rows.items()}), algorithm)
        assert torch.equal(whole.loss[own], alone.loss)
        for name, value in alone.metrics.items():
            assert torch.equal(whole.metrics[name][own], value)


@pytest.mark.parametrize("case", CASES)
@over(factor=st.floats(1e-3, 1e3))
@searched(max_examples=15, deadline=None)
def test_where_the_catalogue_says_homogeneous_loss_and_gradient_scale_with_the_advantage(case, factor):
    algorithm = CASES[case]
    assert find_objective(algorithm.name).homogeneous(algorithm)
    loss, gradients = loss_and_gradient(algorithm)
    scaled, scaled_gradients = loss_and_gradient(algorithm, factor)
    torch.testing.assert_close(scaled, factor * loss, atol=0, rtol=1e-12)
    for scaled_gradient, gradient in zip(scaled_gradients, gradients, strict=True):
        torch.testing.assert_close(scaled_gradient, factor * gradient, atol=1e-14 * factor, rtol=1e-12)


@pytest.mark.parametrize(
    ("case", "changes"),
    [*((case, {"kl_coef": 0.1}) for case in WITH_KL), ("mix_grpo", {"mix": Mix(log_ratio_coef=0.1)})],
)
def test_terms_that_do_not_scale_with_the_advantage_are_known_to_the_catalogue(case, changes):
    algorithm = changed(CASES[case], **changes)
    assert not find_objective(algorithm.name).homogeneous(algorithm)
    plain, doubled = (loss_and_gradient(algorithm, factor)[0] for factor in (1, 2))
    assert (doubled - 2 * plain).abs().max() > 1e-5
