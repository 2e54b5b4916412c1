"""Tests forward-process objectives in the engine: noise that depends on a sample's seed alone, other policies'
velocities, whole samples and pairs, groups of several specs, and gradients equal to the definitions'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from omni_async.config.schema import Config
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.forward_loss import make_draws
from omni_async.training.groups import GroupBatch
from tests.support.fakes import TinyPolicy, load_model, tiny_group
from tests.training.training_world import (
    assert_gradients,
    auxiliary_of,
    gradients,
    gradients_of,
    group_of,
    guided,
    make_config,
    model_of,
    moved,
    nudge,
    started,
    step_on,
    steps_of,
    surrogate,
    trained,
)

SCHEDULE = [1.0, 0.8, 0.6, 0.4, 0.2]


@dataclass(frozen=True)
class Draw:
    """One noise draw of one sample: the point, and the velocity of the model in training there (with gradient)."""

    sample: int
    point: Tensor
    final: Tensor
    noise: Tensor
    sigma: Tensor
    velocity: Tensor
    advantage: float

    @property
    def error(self) -> Tensor:
        return self.error_of(self.velocity)

    def error_of(self, velocity: Tensor) -> Tensor:
        return (velocity - (self.noise - self.final)).square().mean()


def draws_of(model: nn.Module, config: Config, *groups: GroupBatch) -> list[Draw]:
    """Returns every draw of every sample, sample-major, float64."""
    a, found = config.algorithm, []
    for group in groups:
        for i, (t, seed) in enumerate(zip(group.trajectories, group.seeds, strict=True)):
            drawn = make_draws(seed, tuple(t["final"].shape), t["sigmas"], a.forward, a.timestep_fraction)
            final = t["final"].double()
            for sigma, noise in zip(drawn.sigmas.double(), drawn.noises.double(), strict=True):
                point = (1 - sigma) * final + sigma * noise
                velocity = guided(model, config, t, point, sigma)
                found.append(Draw(i, point, final, noise, sigma, velocity, group.advantages[i]))
    return found


def loaded() -> nn.Module:
    return load_model(TinyPolicy(), torch.float64)


def at_end(name: str, **changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    """Returns an engine of an objective of final latents, away from the weights that were loaded, and two groups."""
    return moved(**{"sde": None, "clip_range": None, "cfg": 2.0, "name": name, **changes})


def plain(
    engine: TrainEngine, groups: list[GroupBatch], other: nn.Module, loss: Callable[[Draw, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns the gradient of the mean over all draws of `loss(draw, velocity of the other model there)`."""
    model = model_of(engine)
    pairs = zip(draws_of(model, engine.config, *groups), draws_of(other, engine.config, *groups), strict=True)
    return gradients_of([loss(draw, there.velocity.detach()) for draw, there in pairs], model)


# ---- draws -----------------------------------------------------------------------------------------------------------


def rows_of(engine: TrainEngine, group: GroupBatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (final, noise, sigma) of every row, in the order of training."""
    batches = [rows for rows, counts in engine._loss.batches(group) if counts]
    return [row for rows in batches for row in zip(rows.final, rows.noise, rows.sigma, strict=True)]


@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
def test_draws_depend_on_the_samples_seed_alone(name):
    first: list[Any] = []
    for size in (1, 4, 100):
        engine, groups = at_end(name, size=size, fraction=0.6)
        group = replace(groups[0], seeds=[5, 12, 2**62 + 6, 2**63 - 1])
        rows = rows_of(engine, group)
        first = first or rows
        alone = {key: getattr(group, key)[2:3] for key in ("trajectories", "advantages", "seeds", "staleness")}
        alone_rows = rows_of(engine, replace(group, **alone, size=1))
        for got, expected in zip(rows + alone_rows, first + first[6:9], strict=True):
            assert all(map(torch.equal, got, expected))
    assert len({tuple(noise.flatten().tolist()) for _, noise, _ in first}) == len(first) == 12
    for sample, t in enumerate(group.trajectories):
        rows = first[3 * sample : 3 * sample + 3]
        assert all(torch.equal(final, t["final"]) for final, _, _ in rows)
        sigmas = {round(sigma.item(), 6) for _, _, sigma in rows}
        assert len(sigmas) == 3 and sigmas <= set(SCHEDULE)


@pytest.mark.parametrize(("name", "sizes"), [("awm", [6, 6]), ("diffusion_nft", [7, 5])])
def test_micro_batches_hold_whole_samples_where_the_objective_wants_them(name, sizes):
    engine, groups = at_end(name, size=7, fraction=0.6)
    assert [len(rows.sigma) for rows, _ in engine._loss.batches(groups[0])] == sizes


@pytest.mark.parametrize(("size", "cuts"), [(1, [2] * 5), (5, [4, 4, 2]), (100, [10])])
def test_a_pair_shares_noise_and_sigma_in_alternating_rows(size, cuts):
    engine, groups = at_end("diffusion_dpo", size=size)
    assert [len(rows.sigma) for rows, _ in engine._loss.batches(groups[0])] == cuts
    rows = rows_of(engine, groups[0])
    assert sorted(round(sigma.item(), 6) for _, _, sigma in rows[::2]) == sorted(SCHEDULE)
    for pair in zip(rows[::2], rows[1::2], strict=True):
        for (final, noise, sigma), sample in zip(pair, groups[0].trajectories, strict=True):
            assert torch.equal(final, sample["final"])
            assert torch.equal(noise, pair[0][1]) and torch.equal(sigma, pair[0][2])


def test_unusable_groups_are_refused_before_any_gradient():
    engine, _ = at_end("diffusion_dpo")
    with pytest.raises(ValueError, match="diffusion_dpo trains on pairs, got 4 samples"):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1.0)
    assert gradients(engine) == {}
    engine, groups = at_end("diffusion_nft")
    del groups[0].trajectories[3]["final"]
    with pytest.raises(ValueError, match=r"trajectory 3 of 4: the fields \['final'\] are missing"):
        engine.accumulate(groups[0], 1.0)
    assert gradients(engine) == {}


def test_samples_that_no_policy_made_are_fresh_and_the_oldest_step_counts():
    engine, groups = at_end("diffusion_nft")
    metrics = step_on(engine, replace(groups[0], staleness=[[], [2, 1, 1, 1, 0], [0] * 5, []]))
    assert (metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (0.5, 2)
    with pytest.raises(TrainingError, match="diffusion_nft has no ratio to the policy that made a sample"):
        engine.recompute_proximal(groups[0])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_diffusion_nft_is_its_definition(beta, kl_coef):
    engine, groups = at_end("diffusion_nft", nft={"beta": beta}, kl_coef=kl_coef, fraction=0.6, size=5)

    def loss(d: Draw, start: Tensor) -> Tensor:
        """The old policy and the reference are alike."""
        r = min(max(min(max(d.advantage, -5.0), 5.0) / 10 + 0.5, 0.0), 1.0)
        total = kl_coef * (d.velocity - start).square().mean()
        for share, sign in ((r, 1), (1 - r, -1)):
            off = d.point - d.sigma * (start + sign * beta * (d.velocity - start)) - d.final
            total = total + 5.0 * share * off.square().mean() / max(off.detach().abs().mean().item(), 1e-5) / beta
        return total

    expected = plain(engine, groups, loaded(), loss)
    metrics, got = trained(engine, *groups)
    assert_gradients(got, expected, atol=2e-6)
    assert metrics["old_deviation"] > 1e-4
    assert ("kl_ref" in metrics) == (kl_coef > 0)


@pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_awm_is_its_definition(ratio, off_policy):
    awm = {"ratio": ratio, "off_policy": off_policy, "ema_coef": 0.7, "clip_range": 0.02}
    engine, groups = at_end("awm", awm=awm, kl_coef=0.2, fraction=0.6, ema={"every": 1}, size=5)

    def p(d: Draw, velocity: Tensor) -> Tensor:
        return -((d.error_of(velocity) + 1e-10) ** 0.25 - 1e-10**0.25) * d.sigma / 0.25

    model, losses, clipped = model_of(engine), [], 0
    draws = draws_of(model, engine.config, *groups)
    # The old policy, the reference and the average are alike.
    start = [d.velocity.detach() for d in draws_of(loaded(), engine.config, *groups)]
    ratios = [
        p(d, d.velocity) - p(d, v if off_policy else d.velocity).detach() for d, v in zip(draws, start, strict=True)
    ]
    if ratio == "sum_first":
        ratios = [torch.stack(ratios[i - i % 3 : i - i % 3 + 3]).mean() for i in range(len(draws))]
    for d, v, log_ratio in zip(draws, start, ratios, strict=True):
        advantage = min(max(d.advantage, -5.0), 5.0) / 5
        clipped += bool((log_ratio.exp() - 1).abs() > 0.02)
        losses.append(surrogate(log_ratio.exp(), advantage, 0.02) + 0.9 * (d.velocity - v).square().mean())
    metrics, got = trained(engine, *groups)
    assert_gradients(got, gradients_of(losses, model), atol=1e-6)
    assert metrics["clip_fraction"] == clipped / 24
    assert (0 < clipped < 24) == off_policy


def test_the_pull_to_the_average_changes_over_the_run():
    changes = {"awm": {"ema_coef": 1.0, "ema_coef_end": 0.3}, "ema": {"every": 1}, "trainer.updates": 2}
    engine, groups = at_end("awm", **changes, steps_per_update=2)
    for coef in (1.0, 1.0, 0.65, 0.65, 0.3):

        def loss(d: Draw, average: Tensor, coef: float = coef) -> Tensor:
            log = -((d.error + 1e-10) ** 0.25) * d.sigma / 0.25
            return -d.advantage / 5 * log + coef * (d.velocity - average).square().mean()

        average = loaded()
        average.load_state_dict(auxiliary_of(engine, "ema"))
        expected = plain(engine, groups, average, loss)
        assert_gradients(trained(engine, *groups)[1], expected, atol=1e-6)


def dpo(model: nn.Module, config: Config, groups: list[GroupBatch]) -> tuple[list[Tensor], list[float]]:
    """Computes losses and margins of the four draws of each pair, beta / 2 = 10."""
    losses, margins = [], []
    for group in groups:
        draws, reference = draws_of(model, config, group), draws_of(loaded(), config, group)
        off = [d.error - r.error.item() for d, r in zip(draws, reference, strict=True)]
        for winner, loser in zip(off[:4], off[4:], strict=True):
            margins.append(-10 * (winner - loser).item())
            losses.append(torch.log1p(torch.exp(10 * (winner - loser))))
    return losses, margins


@pytest.mark.parametrize("size", [1, 5, 100])
def test_diffusion_dpo_is_its_definition(size):
    engine, groups = at_end("diffusion_dpo", dpo={"beta": 20.0}, forward={"draws": 4}, size=size)
    model = model_of(engine)
    losses, margins = dpo(model, engine.config, groups)
    metrics, got = trained(engine, *groups)
    assert_gradients(got, gradients_of(losses, model), atol=2e-6)
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert metrics["margin"] == pytest.approx(sum(margins) / 8, rel=1e-4)
    assert metrics["accuracy"] == sum(m > 0 for m in margins) / 8


def test_under_lora_the_reference_is_the_model_without_adapters():
    """Applies the chain rule of W + s B A: dL/dA = s B^T G, dL/dB = s G A^T, with G the gradient of the merged
    weight."""
    lora = {"rank": 2, "alpha": 4.0}
    engine, groups = at_end("diffusion_dpo", dpo={"beta": 20.0}, forward={"draws": 4}, lora=lora)
    adapters = {name: p.detach().double() for name, p in engine._model.trainable.items()}
    layers = [name.removesuffix(".lora_A.weight") for name in adapters if "lora_A" in name]
    halves = {layer: [adapters[f"{layer}.lora_{half}.weight"] for half in "AB"] for layer in layers}
    model = loaded()
    with torch.no_grad():
        for layer, (down, up) in halves.items():
            model.get_parameter(f"{layer}.weight").add_(2.0 * up @ down)
    whole = gradients_of(dpo(model, engine.config, groups)[0], model)
    expected = {}
    for layer, (down, up) in halves.items():
        expected[f"{layer}.lora_A.weight"] = 2.0 * up.T @ whole[f"{layer}.weight"]
        expected[f"{layer}.lora_B.weight"] = 2.0 * whole[f"{layer}.weight"] @ down.T
    metrics, got = trained(engine, *groups)
    assert_gradients(got, expected, atol=2e-6)
    assert abs(metrics["margin"]) > 1e-4


# ---- groups of several specs -----------------------------------------------------------------------------------------


BUCKETS = [
    {"sampling": {}},
    {"sampling": {"height": 64, "width": 64}},
    {"sampling": {"width": 16, "true_cfg_scale": 3.0}},
]


def clipped(model: nn.Module, config: Config, group: GroupBatch) -> list[Tensor]:
    return [surrogate(s.ratio, s.advantage) for s in steps_of(model, config, group)]


def uniform_awm(model: nn.Module, config: Config, group: GroupBatch) -> list[Tensor]:
    return [d.advantage * d.error for d in draws_of(model, config, group)]


ODE = {"sde": None, "clip_range": None, "name": "awm", "awm": {"weighting": "uniform", "advantage_max": None}}


@pytest.mark.parametrize(("changes", "losses"), [({"size": 3}, clipped), (ODE, uniform_awm)])
def test_groups_of_all_buckets_have_the_gradient_of_the_mean_loss(changes, losses):
    engine = started(make_config(buckets=BUCKETS, **changes))
    rollout, groups, rows = engine.config.rollout, [], []
    nudge(engine)
    model = model_of(engine)
    for seed, spec in enumerate(rollout.specs):
        alone = msgspec.structs.replace(rollout, sampling=spec, buckets=())
        config = msgspec.structs.replace(engine.config, rollout=alone)  # of a run that draws this bucket alone
        groups.append(tiny_group(TinyPolicy(), config, seed))
        rows += losses(model, config, groups[-1])
    assert len({group.trajectories[0]["final"].shape for group in groups}) == 3
    assert_gradients(trained(engine, *groups)[1], gradients_of(rows, model))


def test_a_spec_that_the_recipe_does_not_have_is_refused():
    engine = started(make_config(buckets=BUCKETS[1:]))
    with pytest.raises(ValueError, match="not one of the recipe's"):
        engine.accumulate(group_of(engine), 1.0)
