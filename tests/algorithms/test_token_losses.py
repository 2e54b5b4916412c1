"""Tests the objectives on tokens against plain loops over their formulas, and what they have in common."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings as searched
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from omni_async.algorithms.objectives.base import TokenInputs
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Algorithm, Answers, Correction

LENGTHS = [3, 1, 7, 2, 5]
MEANS = ("sequence", "token", "constant")
KEPT = Correction(mode="bypass", k3=1.0, steps="kept")


def make_answers(lengths=LENGTHS, seed=0, drift=0.3, **changes):
    """Makes answers of random tokens whose log-probs moved by `drift`; log_prob is a leaf that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(number):
        return torch.randn(number, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    old = -normal(tokens).abs() - 0.1
    given = TokenInputs(
        log_prob=(old + drift * normal(tokens)).requires_grad_(),
        old_log_prob=old,
        advantage=normal(len(lengths)),
        lengths=torch.tensor(lengths),
        most_tokens=10,
        weight=torch.rand(tokens, generator=generator, dtype=torch.float64),
        ref_log_prob=old + 0.2 * normal(tokens),
    )
    return replace(given, **changes)


def answers_of(given):
    """Yields each answer's advantage and its tokens: log-prob, old log-prob, log-prob of the reference, weight."""
    weight = torch.ones_like(given.log_prob) if given.weight is None else given.weight
    tokens = torch.stack([given.log_prob, given.old_log_prob, given.ref_log_prob, weight], 1).detach()
    for advantage, own in zip(given.advantage.tolist(), tokens.split(given.lengths.tolist()), strict=True):
        yield advantage, own.tolist()


def surrogate(ratio, advantage, low, high, dual):
    """PPO's clipped loss of one ratio."""
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, dual * abs(advantage)) if dual is not None and advantage < 0 else loss


def grpo_by_loops(advantage, tokens, low, high, dual):
    return [w * surrogate(math.exp(p - old), advantage, low, high, dual) for p, old, _, w in tokens]


def gspo_by_loops(advantage, tokens, low, high, dual):
    mean = sum(p - old for p, old, *_ in tokens) / len(tokens)
    return [w * surrogate(math.exp(mean), advantage, low, high, dual) for *_, w in tokens]


def cispo_by_loops(advantage, tokens, low, high, dual):
    return [-w * min(math.exp(p - old), 1 + high) * advantage * p for p, old, _, w in tokens]


def by_loops(given, terms, algorithm, low, high):
    losses = []
    for advantage, tokens in answers_of(given):
        own = terms(advantage, tokens, low, high, algorithm.dual_clip)
        kl = [math.exp(ref - p) - 1 - (ref - p) for p, _, ref, _ in tokens]
        total = sum(own) + algorithm.kl_coef * sum(kl)
        losses.append(total / {"sequence": len(tokens), "token": 1, "constant": 10}[algorithm.answers.mean])
    return torch.tensor(losses, dtype=torch.float64)


def compute(given, algorithm):
    return find_objective(algorithm.name).load()(given, algorithm)


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


# Settings, the loop of their formula, and the clip range in it.
CASES = {
    "grpo": (Algorithm(name="token_grpo"), grpo_by_loops, 0.2, 0.2),
    "dapo": (Algorithm(name="token_grpo", clip_range=(0.2, 0.28)), grpo_by_loops, 0.2, 0.28),
    "dual": (Algorithm(name="token_grpo", clip_range=0.1, dual_clip=1.15), grpo_by_loops, 0.1, 0.1),
    "gspo": (Algorithm(name="token_gspo"), gspo_by_loops, 3e-4, 4e-4),
    "gspo/wide": (Algorithm(name="token_gspo", clip_range=0.1, dual_clip=1.15), gspo_by_loops, 0.1, 0.1),
    "cispo": (Algorithm(name="token_cispo"), cispo_by_loops, 0.2, 0.2),
    "cispo/narrow": (Algorithm(name="token_cispo", clip_range=0.05), cispo_by_loops, 0.05, 0.05),
}
cases = pytest.mark.parametrize("case", CASES)


def test_every_token_objective_is_covered_here():
    assert {o.name for o in BUILT_IN if o.kind == "token"} == {algorithm.name for algorithm, *_ in CASES.values()}


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("mean", MEANS)
@cases
def test_losses_are_those_of_the_formulas(case, mean, kl_coef):
    algorithm, terms, low, high = CASES[case]
    algorithm = changed(algorithm, answers=Answers(mean=mean), kl_coef=kl_coef)
    for given in (make_answers(), make_answers(seed=1, weight=None)):
        close(compute(given, algorithm).loss, by_loops(given, terms, algorithm, low, high))


@cases
def test_the_gradient_is_the_numerical_one_where_the_ratio_has_one(case):
    algorithm = changed(CASES[case][0], kl_coef=0.3)
    given = make_answers()
    if algorithm.name == "token_cispo":  # its ratio is data
        ratio = (given.log_prob - given.old_log_prob).exp().detach().clamp(max=1 + CASES[case][3])
        advantage = given.advantage.repeat_interleave(given.lengths)
        kl = 1 - (given.ref_log_prob - given.log_prob).exp().detach()
        [gradient] = torch.autograd.grad(compute(given, algorithm).loss.sum(), given.log_prob)
        close(gradient, (-given.weight * ratio * advantage + 0.3 * kl) / given.lengths.repeat_interleave(given.lengths))
        return

    def loss(log_prob):
        return compute(replace(given, log_prob=log_prob), algorithm).loss

    assert torch.autograd.gradcheck(loss, given.log_prob.detach().requires_grad_())


@cases
def test_on_policy_all_of_them_have_the_gradient_of_reinforce(case):
    given = make_answers(drift=0.0, weight=None)
    [gradient] = torch.autograd.grad(compute(given, CASES[case][0]).loss.sum(), given.log_prob)
    expected = -(given.advantage / given.lengths).repeat_interleave(given.lengths)
    close(gradient, expected)


def test_metrics_are_means_over_the_tokens_of_an_answer():
    given = make_answers()
    parts = (given.log_prob - given.old_log_prob).detach().split(LENGTHS)
    reference = (given.ref_log_prob - given.log_prob).detach().split(LENGTHS)
    for case in ("dual", "cispo/narrow"):
        algorithm, _, low, high = CASES[case]
        got = compute(given, algorithm).metrics
        close(got["ratio_deviation"], [(part.exp() - 1).abs().mean() for part in parts])
        close(got["approx_kl"], [(part**2 / 2).mean() for part in parts])
        close(got["kl_ref"], [(gap.exp() - 1 - gap).mean() for gap in reference])
        close(got["clipped_high"], [(part.exp() > 1 + high).double().mean() for part in parts])
        bounded = algorithm.name == "token_grpo"
        close(got["clipped_low"], [(part.exp() < 1 - low).double().mean() * bounded for part in parts])
        if bounded:
            bad = [
                (a < 0) * (part.exp() > 1.15).double().mean() for a, part in zip(given.advantage, parts, strict=True)
            ]
            close(got["dual_clipped"], bad)
    assert "kl_ref" not in compute(replace(given, ref_log_prob=None), algorithm).metrics
    means = torch.stack([part.mean() for part in parts]).exp()
    got = compute(given, CASES["gspo"][0]).metrics
    close(got["ratio_deviation"], (means - 1).abs())
    assert got["clipped_high"].tolist() == (means > 1 + 4e-4).double().tolist()
    assert got["clipped_low"].tolist() == (means < 1 - 3e-4).double().tolist()


def test_the_ratio_of_an_answer_may_be_that_of_its_kept_tokens():
    given = make_answers()
    weight = torch.where(torch.arange(18) % 3 == 0, 0.0, given.weight)
    weight[3] = 0.0  # the only token of the second answer
    given = replace(given, weight=weight, ref_log_prob=None)
    algorithm = Algorithm(name="token_gspo", clip_range=9.0, correction=KEPT)
    got = compute(given, algorithm).loss
    for i, (own, kept) in enumerate(
        zip((given.log_prob - given.old_log_prob).split(LENGTHS), (weight > 0).split(LENGTHS), strict=True)
    ):
        mean = own[kept].mean() if kept.any() else torch.zeros(()).double()
        close(got[i], -given.advantage[i] * mean.exp() * weight.split(LENGTHS)[i].mean())
    unmasked = replace(given, weight=torch.ones(18).double())
    close(compute(unmasked, algorithm).loss, compute(replace(given, weight=None), algorithm).loss, 1e-14)


@cases
def test_everything_but_log_prob_is_data(case):
    given = make_answers()
    leaves = {
        field.name: getattr(given, field.name).detach().requires_grad_()
        for field in fields(given)
        if field.name not in ("lengths", "most_tokens")
    }
    out = compute(replace(given, **leaves), changed(CASES[case][0], kl_coef=0.3))
    out.loss.sum().backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()} == {"log_prob"}
    assert not any(values.requires_grad for values in out.metrics.values())


@cases
@pytest.mark.parametrize("mean", MEANS)
def test_an_answer_does_not_depend_on_its_batch(case, mean):
    algorithm, given = changed(CASES[case][0], answers=Answers(mean=mean)), make_answers()
    whole, first = compute(given, algorithm), 0
    for i, length in enumerate(LENGTHS):
        own = slice(first, first + length)
        tokens = {name: getattr(given, name)[own] for name in ("log_prob", "old_log_prob", "weight", "ref_log_prob")}
        alone = compute(
            replace(given, **tokens, advantage=given.advantage[i : i + 1], lengths=given.lengths[i : i + 1]), algorithm
        )
        assert torch.equal(alone.loss, whole.loss[i : i + 1])
        for name, values in alone.metrics.items():
            close(values, whole.metrics[name][i : i + 1], 1e-15)
        first += length


@cases
@over(factor=st.floats(1e-3, 1e3))
@searched(max_examples=15, deadline=None)
def test_losses_scale_with_the_advantage_without_a_kl(case, factor):
    algorithm, given = CASES[case][0], make_answers()
    assert find_objective(algorithm.name).homogeneous(algorithm)
    assert not find_objective(algorithm.name).homogeneous(changed(algorithm, kl_coef=0.1))
    scaled = compute(replace(given, advantage=factor * given.advantage), algorithm).loss
    torch.testing.assert_close(scaled, factor * compute(given, algorithm).loss, atol=0, rtol=1e-12)


def test_the_kl_is_unbiased_for_tokens_of_the_policy():
    """Weighs the estimate of each token of a vocabulary by the policy's probability."""
    generator = torch.Generator().manual_seed(4)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    given = make_answers([1] * 50, log_prob=policy, old_log_prob=policy, ref_log_prob=reference)
    estimates = compute(given, CASES["grpo"][0]).metrics["kl_ref"]
    close((policy.exp() * estimates).sum(), (policy.exp() * (policy - reference)).sum())
    assert (estimates >= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(18, 1)}, r"log_prob must have shape \(T,\), got \(18, 1\)"),
        ({"weight": torch.zeros(5)}, r"weight must have shape \(18,\) like log_prob, got \(5,\)"),
        ({"ref_log_prob": torch.zeros(17)}, r"ref_log_prob must have shape \(18,\)"),
        ({"advantage": torch.zeros(18)}, r"advantage must have shape \(5,\), a number per answer, got \(18,\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_answers(**change)


@cases
def test_a_kl_without_a_reference_is_refused_and_float32_stays(case):
    with pytest.raises(ValueError, match=r"algorithm\.kl_coef is 0\.7 but there is no ref_log_prob"):
        compute(make_answers(ref_log_prob=None), changed(CASES[case][0], kl_coef=0.7))
    given = make_answers()
    out = compute(replace(given, log_prob=given.log_prob.detach().float().requires_grad_()), CASES[case][0])
    assert out.loss.dtype == torch.float32 and out.loss.requires_grad and out.loss.shape == (5,)
    assert all((m.shape, m.dtype) == ((5,), torch.float32) for m in out.metrics.values())
    close(out.loss.double(), compute(given, CASES[case][0]).loss, 1e-5)
