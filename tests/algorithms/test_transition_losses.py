"""Tests the loss of every objective on transitions against its formula, row by row in Python numbers, the shared parts,
and what all have in common: gradients, dtypes, weights, and independence of the batch."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings as searched
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from omni_async.algorithms.objectives.base import TransitionInputs
from omni_async.algorithms.objectives.transition import (
    clipped_surrogate,
    dance_grpo,
    flow_dppo,
    flow_grpo,
    grpo_guard,
    gspo,
    log_ratios,
    log_ratios_nats,
    mix_grpo,
    objective_output,
)
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Algorithm, Dppo, Guard, Mix
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


@dataclass
class Steps:
    """Steps x -> x_next that an old velocity took, seen by another `velocity` (R, 3, 4), a leaf that wants a
    gradient."""

    kind: str
    velocity: torch.Tensor
    old_velocity: torch.Tensor
    ref_velocity: torch.Tensor
    x: torch.Tensor
    x_next: torch.Tensor
    advantage: torch.Tensor
    sigma: torch.Tensor
    sigma_next: torch.Tensor
    noise_level: torch.Tensor

    def at(self, velocity):
        largest = torch.full_like(self.sigma, 0.97)
        return transition(self.kind, self.x, velocity, self.sigma, self.sigma_next, largest, self.noise_level)

    def inputs(self, **changes):
        current, old, ref = self.at(self.velocity), self.at(self.old_velocity), self.at(self.ref_velocity)
        given = TransitionInputs(
            log_prob=log_prob(self.kind, self.x_next, current.mean, current.scale),
            old_log_prob=log_prob(self.kind, self.x_next, old.mean, old.scale),
            advantage=self.advantage,
            mean=current.mean,
            old_mean=old.mean,
            std=current.std,
            scale=current.scale,
            nats_per_log_prob=D / (2 * current.scale**2) if self.kind == "cps" else torch.full_like(current.scale, D),
            ref_mean=ref.mean,
            num_elements=D,
            kind=self.kind,
        )
        return replace(given, **changes)


def gaussian_steps(kind="flow", rows=24, seed=0, drift=0.3, steps_per_sample=1):
    """Makes random float64 steps; `drift` is how far the velocity has moved per element. Rows of a sample share its
    advantage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high):
        return low + (high - low) * torch.rand(rows, generator=generator, dtype=torch.float64)

    x, old_velocity, noise = normal(rows, *SHAPE), normal(rows, *SHAPE), normal(rows, *SHAPE)
    sigma, noise_level = uniform(0.4, 0.95), uniform(0.4, 0.9)
    sigma_next = sigma * uniform(0.7, 0.9)
    x_next, _, _ = take_step(kind, x, old_velocity, sigma, sigma_next, torch.full_like(sigma, 0.97), noise_level, noise)
    return Steps(
        kind=kind,
        velocity=(old_velocity + drift * normal(rows, *SHAPE)).requires_grad_(),
        old_velocity=old_velocity,
        ref_velocity=old_velocity + drift * normal(rows, *SHAPE),
        x=x,
        x_next=x_next,
        advantage=normal(rows // steps_per_sample).repeat_interleave(steps_per_sample),
        sigma=sigma,
        sigma_next=sigma_next,
        noise_level=noise_level,
    )


def ratio_of(given, *rows):
    """Returns exp of the mean log-ratio of some rows, a Python number."""
    return math.exp(math.fsum((given.log_prob[row] - given.old_log_prob[row]).item() for row in rows) / len(rows))


def clipped(advantage, ratio, clip):
    """Returns PPO's loss of one row and its derivative with respect to log ratio, as Python numbers."""
    inside = -advantage * ratio
    outside = -advantage * min(max(ratio, 1 - clip), 1 + clip)
    return max(inside, outside), (inside if inside >= outside else 0.0)


def mean_square(a, b):
    """Computes <(a - b)^2> of one row, element by element."""
    return math.fsum((p - q) ** 2 for p, q in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)) / a.numel()


def close(got, expected, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


def example(kind="flow", seed=0, rows=ROWS, **changes):
    """Returns steps and their inputs, each sample with a weight of its own."""
    steps = gaussian_steps(kind, rows=rows, seed=seed, steps_per_sample=changes.get("steps_per_sample", 1))
    number = rows // changes.get("steps_per_sample", 1)
    weight = torch.rand(number, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return steps, steps.inputs(weight=weight.repeat_interleave(rows // number), **changes)


def kl(given, row, exact=False):
    width = (given.scale if exact else given.std)[row].item()
    return mean_square(given.mean[row], given.ref_mean[row]) / (2 * width**2)


def surrogates(given, clip, log_ratios=None):
    """Returns PPO's loss of every row, and how many are held by the clip."""
    ratios = [ratio_of(given, row) for row in range(len(given.advantage))] if log_ratios is None else log_ratios
    rows = [clipped(advantage, ratio, clip) for advantage, ratio in zip(given.advantage.tolist(), ratios, strict=True)]
    held = sum(slope == 0 for _, slope in rows)
    assert 0 < held < len(rows)
    return [loss for loss, _ in rows]


@kinds
@kl_coefs
@pytest.mark.parametrize("exact", [False, True])
def test_flow_grpo_and_mix_grpo_and_dance_grpo(kind, kl_coef, exact):
    clip = 0.002 if kind == "cps" else 0.02
    _, given = example(kind)
    settings = {"clip_range": clip, "kl_form": "exact" if exact else "published"}
    losses = [w * loss for w, loss in zip(given.weight.tolist(), surrogates(given, clip), strict=True)]
    pulls = [kl_coef * kl(given, row, exact) for row in range(ROWS)]
    drifts = [5.0 * math.log(ratio_of(given, row)) ** 2 / 2 for row in range(ROWS)]
    expected = [a + b for a, b in zip(losses, pulls, strict=True)]
    close(flow_grpo(given, Algorithm(kl_coef=kl_coef, **settings)).loss, expected, 1e-10)
    mixed = mix_grpo(given, Algorithm(kl_coef=kl_coef, mix=Mix(log_ratio_coef=5.0), **settings))
    close(mixed.loss, [sum(terms) for terms in zip(expected, drifts, strict=True)], 1e-10)
    close(dance_grpo(given, Algorithm(**settings)).loss, losses, 1e-10)


def test_the_default_clip_range_is_flow_grpos():
    given = gaussian_steps(drift=1e-3).inputs()
    assert torch.equal(flow_grpo(given, Algorithm()).loss, flow_grpo(given, Algorithm(clip_range=1e-4)).loss)
    assert 0 < float(flow_grpo(given, Algorithm()).metrics["clipped_high"].sum()) < ROWS


@kl_coefs
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("scale", ["batch", "sample"])
def test_grpo_guard(scale, divide, kl_coef):
    steps, given = example(seed=4)
    out = grpo_guard(given, Algorithm(clip_range=0.01, kl_coef=kl_coef, guard=Guard(scale=scale, divide=divide)))
    root_h = (steps.sigma - steps.sigma_next).sqrt().tolist()
    std = (steps.noise_level * (steps.sigma / (1 - steps.sigma)).sqrt()).tolist()
    if scale == "batch":
        root_h, std = [sum(root_h) / ROWS] * ROWS, [sum(std) / ROWS] * ROWS
    widths = [a * b for a, b in zip(root_h, std, strict=True)]
    biases = [mean_square(given.mean[row], given.old_mean[row]) / (2 * widths[row] ** 2) for row in range(ROWS)]
    ratios = [(ratio_of(given, row) * math.exp(biases[row])) ** widths[row] for row in range(ROWS)]
    factors = [w / (h**2 if divide else 1) for w, h in zip(given.weight.tolist(), root_h, strict=True)]
    losses = surrogates(given, 0.01, ratios)
    close(out.loss, [factors[row] * losses[row] + kl_coef * kl(given, row) for row in range(ROWS)], 1e-10)
    close(out.metrics["guard_bias"], biases, 1e-10)
    close(out.metrics["ratio_deviation"], [abs(ratio - 1) for ratio in ratios], 1e-10)
    close(out.metrics["approx_kl"], (given.log_prob - given.old_log_prob).detach().square() / 2)


@kinds
@kl_coefs
@pytest.mark.parametrize("width", ["transition", "unit"])
def test_flow_dppo(kind, width, kl_coef):
    _, given = example(kind, seed=6, rows=40)
    divisors = [2 * s**2 if width == "transition" else 2.0 for s in given.scale.tolist()]
    kappas = [mean_square(given.mean[row], given.old_mean[row]) / divisors[row] for row in range(40)]
    limit = sorted(kappas)[20] * (1 - 1e-9)
    losses, dropped = [], []
    for row, (advantage, weight) in enumerate(zip(given.advantage.tolist(), given.weight.tolist(), strict=True)):
        ratio = ratio_of(given, row)
        dropped.append(float(kappas[row] >= limit and advantage * (ratio - 1) > 0))
        losses.append((1 - dropped[-1]) * -advantage * ratio * weight + kl_coef * kl(given, row))
    out = flow_dppo(given, Algorithm(kl_coef=kl_coef, dppo=Dppo(kappa_max=limit, width=width)))
    assert 0 < sum(dropped) < 20
    close(out.loss, losses, 1e-10)
    assert out.metrics["dropped"].tolist() == dropped
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
    _, given = example(kind, seed=8, steps_per_sample=each)
    samples = [range(first, first + each) for first in range(0, ROWS, each)]
    ratios = [ratio_of(given, *rows) for rows in samples for _ in rows]
    losses = surrogates(given, 0.01, ratios)
    out = gspo(given, Algorithm(clip_range=0.01, kl_coef=kl_coef))
    close(out.loss, [given.weight[row].item() * losses[row] + kl_coef * kl(given, row) for row in range(ROWS)], 1e-10)
    close(out.metrics["ratio_deviation"], [abs(ratio - 1) for ratio in ratios], 1e-10)
    close(out.metrics["approx_kl"], [math.log(ratio_of(given, row)) ** 2 / 2 for row in range(ROWS)], 1e-10)


@kinds
@pytest.mark.parametrize(("objective", "each"), [(flow_grpo, 1), (gspo, 3)])
def test_a_clip_range_in_nats_bounds_the_mean_over_steps_of_whole_sample_log_ratios(objective, each, kind):
    """Counts steps of `cps` by their densities, although their log-probs lack a factor."""
    steps = gaussian_steps(kind, seed=3, steps_per_sample=each)
    given = steps.inputs(steps_per_sample=each)
    distances = [(steps.x_next - mean).detach().square().flatten(1).sum(1) for mean in (given.old_mean, given.mean)]
    nats = ((distances[0] - distances[1]) / (2 * given.scale**2)).tolist()
    losses, held = [], 0
    for first in range(0, ROWS, each):
        rows = range(first, first + each)
        average, advantage = math.fsum(nats[row] for row in rows) / each, given.advantage[first].item()
        outside = abs(average) > 0.2 and advantage * average > 0
        held += outside
        log_ratio = math.log(ratio_of(given, *rows)) * (0.2 / abs(average) if outside else 1)
        losses += [-advantage * math.exp(log_ratio)] * each
    assert 0 < held < ROWS / each
    close(objective(given, Algorithm(clip_range_nats=0.2)).loss, losses, 1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(1, 1)}, r"log_prob must have shape \(R,\), got \(1, 1\)"),
        ({"old_log_prob": torch.zeros(2)}, r"old_log_prob must have shape \(1,\).*got \(2,\)"),
        ({"nats_per_log_prob": torch.zeros(3)}, r"nats_per_log_prob must have shape \(1,\).*got \(3,\)"),
        ({"weight": torch.zeros(())}, r"weight must have shape \(1,\).*got \(\)"),
        ({"num_elements": 5}, r"1 rows of 5 elements, got shape \(1, 2, 3\)"),
        ({"ref_mean": torch.zeros(1, 6)}, r"ref_mean must have shape \(1, 2, 3\).*got \(1, 6\)"),
        ({"old_mean": torch.zeros(2, 2, 3)}, r"old_mean must have shape \(1, 2, 3\).*got \(2, 2, 3\)"),
        ({"steps_per_sample": 2}, "1 rows are not whole samples of 2 steps"),
        ({"steps_per_sample": 0}, "1 rows are not whole samples of 0 steps"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        inputs([1.0], [1.0], **change)


def surrogate(given, algorithm=Algorithm(clip_range=0.1)):  # noqa: B008
    return clipped_surrogate(given, algorithm, log_ratios(given), log_ratios_nats(given))


def test_tiny_clip_ranges_work_in_float32():
    given = inputs([1.0, 1.0], [1.0, 1.0], torch.float32, log_prob=torch.tensor([0.9e-6, 1.1e-6]))
    assert surrogate(given, Algorithm(clip_range=1e-6))[1]["clipped_high"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("objective", "kind", "changes", "algorithm", "message"),
    [
        (dance_grpo, "dance", {}, Algorithm(kl_coef=0.04), r"algorithm\.kl_coef: dance_grpo has no KL term, got 0\.04"),
        (grpo_guard, "cps", {}, Algorithm(), "'flow' alone; got 'cps'"),
        (grpo_guard, "dance", {}, Algorithm(), "'flow' alone; got 'dance'"),
        (grpo_guard, "flow", {"old_mean": None}, Algorithm(), "grpo_guard needs old_mean"),
        (flow_dppo, "flow", {"old_mean": None}, Algorithm(), "flow_dppo needs old_mean"),
        (gspo, "flow", {"ref_mean": None}, Algorithm(kl_coef=0.7), r"kl_coef is 0\.7 but there is no ref_mean"),
    ],
)
def test_what_an_objective_cannot_use_is_refused(objective, kind, changes, algorithm, message):
    with pytest.raises(ValueError, match=message):
        objective(gaussian_steps(kind).inputs(**changes), algorithm)


def test_a_clip_range_is_given_once_and_in_nats_only_where_the_log_ratio_is_one_of_densities():
    given = inputs([1.0], [1.0])
    with pytest.raises(ValueError, match=r"not both \(got 0.0001 and 0.5\)"):
        surrogate(given, Algorithm(clip_range=1e-4, clip_range_nats=0.5))
    with pytest.raises(ValueError, match=r"clip_range_nats: the ratio of grpo_guard is rescaled.*use clip_range"):
        clipped_surrogate(given, Algorithm(name="grpo_guard", clip_range_nats=0.5), log_ratios(given), None)


@pytest.mark.parametrize(("form", "divisor"), [("published", 2 * 0.5**2), ("exact", 2 * 0.2**2), ("mean", 1.0)])
def test_each_kl_form_by_hand(form, divisor):
    mean, ref = (torch.full((1, 2, 3), value, dtype=torch.float64) for value in (0.3, 0.1))
    given = inputs([1.0], [0.0], mean=mean, ref_mean=ref)
    out = objective_output(given, Algorithm(kl_coef=0.5, kl_form=form), torch.zeros(1, dtype=torch.float64), {})
    close(out.loss, [0.5 * 0.04 / divisor])
    close(out.metrics["kl_ref"], [0.04 / divisor])


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
}
WITH_KL = sorted(CASES.keys() - {"dance_grpo"})


def of_two_steps(rows=24, **changes):
    """Makes samples of two steps."""
    steps = gaussian_steps(rows=rows, seed=11, steps_per_sample=2)
    return steps, steps.inputs(steps_per_sample=2, **changes)


def compute(algorithm):
    return find_objective(algorithm.name).load()


def loss_and_gradient(steps, algorithm, **changes):
    """Returns the losses, and the gradient of their sum with respect to the velocity."""
    loss = compute(algorithm)(steps.inputs(steps_per_sample=2, **changes), algorithm).loss
    return loss, torch.autograd.grad(loss.sum(), steps.velocity)[0]


def with_kl(case):
    return changed(CASES[case], kl_coef=0.1 if case in WITH_KL else 0.0)


def tensors(given, dtype=torch.float64):
    """Returns every tensor of the inputs by name, cut off from the graph."""
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    return {name: value.detach().to(dtype) for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_every_transition_objective_is_covered_here():
    assert {o.name for o in BUILT_IN if o.kind == "transition"} == {algorithm.name for algorithm in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_with_respect_to_log_prob_and_mean_is_the_numerical_one(case):
    algorithm = changed(with_kl(case), mix=Mix(log_ratio_coef=0.3))
    _, given = of_two_steps(rows=6)

    def loss(log_prob, mean):
        return compute(algorithm)(replace(given, log_prob=log_prob, mean=mean), algorithm).loss

    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in (given.log_prob, given.mean)))


@pytest.mark.parametrize("case", CASES)
def test_everything_but_log_prob_and_mean_is_data(case):
    _, given = of_two_steps(weight=torch.ones(24, dtype=torch.float64))
    leaves = {name: value.requires_grad_() for name, value in tensors(given).items()}
    compute(CASES[case])(replace(given, **leaves), with_kl(case)).loss.sum().backward()
    reached = {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()}
    assert reached == ({"log_prob", "mean"} if case in WITH_KL else {"log_prob"})


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_with_float64_on_both_sides_of_the_trust_region(case):
    algorithm = with_kl(case)
    _, given = of_two_steps()
    results = []
    for dtype in (torch.float64, torch.float32):
        rows = tensors(given, dtype)
        leaves = rows["log_prob"].requires_grad_(), rows["mean"].requires_grad_()
        out = compute(algorithm)(replace(given, **rows), algorithm)
        assert (out.loss.shape, out.loss.dtype, out.loss.requires_grad) == ((24,), dtype, True)
        assert {"ratio_deviation", "approx_kl", "kl_ref"} <= out.metrics.keys()
        assert all((m.shape, m.dtype, m.requires_grad) == ((24,), dtype, False) for m in out.metrics.values())
        beyond = (
            out.metrics["dropped"]
            if "dropped" in out.metrics
            else out.metrics["clipped_low"] + out.metrics["clipped_high"]
        )
        assert 0 < beyond.sum() < len(beyond)
        results.append((out.loss, *torch.autograd.grad(out.loss.sum(), leaves, materialize_grads=True)))
    for exact, single in zip(*results, strict=True):
        close(single.double(), exact, 1e-5)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"grpo_guard/batch"}))
def test_a_sample_does_not_depend_on_its_batch(case):
    algorithm = with_kl(case)
    _, given = of_two_steps()
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
    steps, _ = of_two_steps()
    loss, gradient = loss_and_gradient(steps, algorithm)
    scaled, scaled_gradient = loss_and_gradient(steps, algorithm, advantage=factor * steps.advantage)
    torch.testing.assert_close(scaled, factor * loss, atol=0, rtol=1e-12)
    torch.testing.assert_close(scaled_gradient, factor * gradient, atol=1e-14 * factor, rtol=1e-12)


@pytest.mark.parametrize(
    ("case", "changes"),
    [*((case, {"kl_coef": 0.1}) for case in WITH_KL), ("mix_grpo", {"mix": Mix(log_ratio_coef=0.1)})],
)
def test_terms_that_do_not_scale_with_the_advantage_are_known_to_the_catalogue(case, changes):
    algorithm = changed(CASES[case], **changes)
    assert not find_objective(algorithm.name).homogeneous(algorithm)
    steps, _ = of_two_steps()
    plain, doubled = (loss_and_gradient(steps, algorithm, advantage=k * steps.advantage)[0] for k in (1, 2))
    assert (doubled - 2 * plain).abs().max() > 1e-5
