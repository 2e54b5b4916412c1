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

from omni_async.algorithms.kinds import num_draws
from omni_async.config.schema import Config
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.forward_loss import make_draws
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy, load_model, tiny_group, tiny_pair
from tests.training.training_world import (
    assert_gradients,
    auxiliary_of,
    gradients,
    gradients_of,
    guided,
    make_config,
    model_of,
    nudge,
    started,
    stepped,
    steps_of,
    surrogate,
)

ODE = {"sde": None, "clip_range": None, "cfg": 2.0}
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


def draws_of(model: nn.Module, config: Config, group: GroupBatch) -> list[Draw]:
    """Returns every draw of every sample, sample-major, float64."""
    policy, a, found = TinyPolicy(), config.algorithm, []
    for i, (t, seed) in enumerate(zip(group.trajectories, group.seeds, strict=True)):
        drawn = make_draws(seed, tuple(t["final"].shape), t["sigmas"], a.forward, a.timestep_fraction)
        for sigma, noise in zip(drawn.sigmas.double(), drawn.noises.double(), strict=True):
            final = t["final"].double()
            point = (1 - sigma) * final + sigma * noise
            velocity = guided(model, policy, config, t, point, sigma)
            found.append(Draw(i, point, final, noise, sigma, velocity, group.advantages[i]))
    return found


def loaded() -> nn.Module:
    return load_model(TinyPolicy(), torch.float64)


def trained(engine: TrainEngine, groups: list[GroupBatch]) -> tuple[dict[str, float], dict[str, Tensor]]:
    a = engine.config.algorithm
    draws = num_draws(engine.config.rollout.num_inference_steps, a.forward, a.timestep_fraction)
    rows = sum(len(g.trajectories) for g in groups) * draws
    for group in groups:
        engine.accumulate(group, 1 / rows)
    return stepped(engine)


def plain(
    engine: TrainEngine, groups: list[GroupBatch], others: dict[str, nn.Module], loss: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Returns the gradient of the mean over all draws of `loss(draw, **velocities of the other models there)`."""
    model = model_of(engine)
    losses = []
    for group in groups:
        with torch.no_grad():
            there = {
                name: [d.velocity for d in draws_of(other, engine.config, group)] for name, other in others.items()
            }
        for i, draw in enumerate(draws_of(model, engine.config, group)):
            losses.append(loss(draw, **{name: velocities[i] for name, velocities in there.items()}))
    return gradients_of(torch.stack(losses).mean(), model)


def moved(name: str, **changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    """Returns an engine away from the weights that were loaded, and two groups."""
    engine = started(make_config(**ODE, **{"name": name, **changes}))
    make = tiny_pair if name == "diffusion_dpo" else tiny_group
    groups = [make(TinyPolicy(), engine.config, seed) for seed in (0, 1)]
    nudge(engine, size=0.05)
    return engine, groups


# ---- draws -----------------------------------------------------------------------------------------------------------


def rows_of(engine: TrainEngine, group: GroupBatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns (final, noise, sigma) of every row, in the order of training."""
    batches = [rows for rows, counts in engine._loss.batches(group) if counts]
    return [row for rows in batches for row in zip(rows.final, rows.noise, rows.sigma, strict=True)]


@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
def test_draws_depend_on_the_samples_seed_alone(name):
    seen = []
    for size in (1, 4, 100):
        engine, groups = moved(name, size=size, fraction=0.6)
        group = replace(groups[0], seeds=[5, 12, 2**62 + 6, 2**63 - 1])
        seen.append(rows_of(engine, group))
        assert len(seen[-1]) == 4 * 3
        alone = replace(
            group,
            trajectories=group.trajectories[2:3],
            advantages=[0.0],
            seeds=group.seeds[2:3],
            staleness=group.staleness[2:3],
            size=1,
        )
        for got, expected in zip(rows_of(engine, alone), seen[-1][6:9], strict=True):
            assert all(map(torch.equal, got, expected))
    for other in seen[1:]:
        assert all(
            torch.equal(a, b)
            for got, expected in zip(other, seen[0], strict=True)
            for a, b in zip(got, expected, strict=True)
        )
    assert len({tuple(noise.flatten().tolist()) for _, noise, _ in seen[0]}) == 12
    for sample, t in enumerate(group.trajectories):
        rows = seen[0][3 * sample : 3 * sample + 3]
        assert all(torch.equal(final, t["final"]) for final, _, _ in rows)
        sigmas = [round(sigma.item(), 6) for _, _, sigma in rows]
        assert len(set(sigmas)) == 3
        assert set(sigmas) <= set(SCHEDULE)


def test_micro_batches_hold_whole_samples_where_the_objective_wants_them():
    engine, groups = moved("awm", size=7, fraction=0.6)
    assert [len(rows.sigma) for rows, _ in engine._loss.batches(groups[0])] == [6, 6]
    engine, groups = moved("diffusion_nft", size=7, fraction=0.6)
    assert [len(rows.sigma) for rows, _ in engine._loss.batches(groups[0])] == [7, 5]


def test_a_pair_shares_noise_and_sigma_in_alternating_rows():
    for size, cuts in ((1, [2] * 5), (5, [4, 4, 2]), (100, [10])):
        engine, groups = moved("diffusion_dpo", size=size)
        assert [len(rows.sigma) for rows, _ in engine._loss.batches(groups[0])] == cuts
        rows = rows_of(engine, groups[0])
        assert sorted(round(sigma.item(), 6) for _, _, sigma in rows[::2]) == sorted(SCHEDULE)
        for winner, loser in zip(rows[::2], rows[1::2], strict=True):
            assert torch.equal(winner[0], groups[0].trajectories[0]["final"])
            assert torch.equal(loser[0], groups[0].trajectories[1]["final"])
            assert torch.equal(winner[1], loser[1])
            assert torch.equal(winner[2], loser[2])


def test_a_group_that_is_no_pair_is_refused():
    engine, _ = moved("diffusion_dpo")
    with pytest.raises(ValueError, match="diffusion_dpo trains on pairs, got 4 samples"):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1.0)
    assert gradients(engine) == {}


def test_samples_without_their_end_are_refused():
    engine, groups = moved("diffusion_nft")
    del groups[0].trajectories[3]["final"]
    with pytest.raises(ValueError, match=r"trajectory 3 of 4: the fields \['final'\] are missing"):
        engine.accumulate(groups[0], 1.0)


def test_samples_that_no_policy_made_are_fresh_and_the_oldest_step_counts():
    engine, groups = moved("diffusion_nft")
    engine.accumulate(replace(groups[0], staleness=[[], [2, 1, 1, 1, 0], [0] * 5, []]), 1 / 20)
    metrics = engine.step()
    assert (metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (0.5, 2)


def test_there_is_no_behaviour_policy_to_compare_with():
    engine, groups = moved("awm")
    with pytest.raises(TrainingError, match="awm has no ratio to the policy that made a sample"):
        engine.recompute_proximal(groups[0])


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_diffusion_nft_is_its_definition(beta, kl_coef):
    changes = {"nft": {"beta": beta}, "kl_coef": kl_coef, "fraction": 0.6}
    engine, groups = moved("diffusion_nft", **changes, size=5)

    def loss(d: Draw, old: Tensor, reference: Tensor) -> Tensor:
        r = min(max(min(max(d.advantage, -5.0), 5.0) / 10 + 0.5, 0.0), 1.0)
        total = kl_coef * (d.velocity - reference).square().mean()
        for share, v in ((r, beta * d.velocity + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * d.velocity)):
            off = d.point - d.sigma * v - d.final
            total = total + 5.0 * share * off.square().mean() / max(off.detach().abs().mean().item(), 1e-5) / beta
        return total

    expected = plain(engine, groups, {"old": loaded(), "reference": loaded()}, loss)
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected, atol=2e-6)
    assert metrics["old_deviation"] > 1e-4
    assert ("kl_ref" in metrics) == (kl_coef > 0)


@pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_awm_is_its_definition(ratio, off_policy):
    awm = {"ratio": ratio, "off_policy": off_policy, "ema_coef": 0.7, "clip_range": 0.02}
    changes = {"awm": awm, "kl_coef": 0.2, "fraction": 0.6, "ema": {"every": 1}}
    engine, groups = moved("awm", **changes, size=5)

    def p(d: Draw, velocity: Tensor) -> Tensor:
        return -((d.error_of(velocity) + 1e-10) ** 0.25 - 1e-10**0.25) * d.sigma / 0.25

    model, losses, clipped = model_of(engine), [], 0
    for group in groups:
        draws = draws_of(model, engine.config, group)
        start = [
            d.velocity.detach() for d in draws_of(loaded(), engine.config, group)
        ]  # old, reference and average alike
        for i in range(0, 12, 3):
            logs = [p(d, d.velocity) for d in draws[i : i + 3]]
            olds = (
                [p(d, v).detach() for d, v in zip(draws[i : i + 3], start[i : i + 3], strict=True)]
                if off_policy
                else []
            )
            ratios = [a - b for a, b in zip(logs, olds or [x.detach() for x in logs], strict=True)]
            if ratio == "sum_first":
                ratios = [torch.stack(ratios).mean()] * 3
            for d, v, log_ratio in zip(draws[i : i + 3], start[i : i + 3], ratios, strict=True):
                advantage = min(max(d.advantage, -5.0), 5.0) / 5
                rho = log_ratio.exp()
                clipped += bool((rho - 1).abs() > 0.02)
                surrogate = torch.maximum(-advantage * rho, -advantage * rho.clamp(0.98, 1.02))
                losses.append(surrogate + 0.9 * (d.velocity - v).square().mean())
    metrics, got = trained(engine, groups)
    assert_gradients(got, gradients_of(torch.stack(losses).mean(), model), atol=1e-6)
    assert metrics["clip_fraction"] == clipped / 24
    assert (0 < clipped < 24) == off_policy


def test_the_pull_to_the_average_changes_over_the_run():
    changes = {"awm": {"ema_coef": 1.0, "ema_coef_end": 0.3}, "ema": {"every": 1}, "trainer.updates": 2}
    engine, groups = moved("awm", **changes, steps_per_update=2)
    for coef in (1.0, 1.0, 0.65, 0.65, 0.3):

        def loss(d: Draw, ema: Tensor, coef: float = coef) -> Tensor:
            log = -((d.error + 1e-10) ** 0.25) * d.sigma / 0.25
            return -d.advantage / 5 * log + coef * (d.velocity - ema).square().mean()

        average = loaded()
        average.load_state_dict(auxiliary_of(engine, "ema"))
        expected = plain(engine, groups, {"ema": average}, loss)
        assert_gradients(trained(engine, groups)[1], expected, atol=1e-6)


def dpo(draws: list[Draw], reference: list[Draw]) -> tuple[list[Tensor], list[float]]:
    """Computes losses and margins of a pair's four draws, beta / 2 = 10."""
    losses, margins = [], []
    for k in range(4):
        d = (draws[k].error - reference[k].error.item()) - (draws[4 + k].error - reference[4 + k].error.item())
        margins.append(-10 * d.item())
        losses.append(torch.log1p(torch.exp(10 * d)))
    return losses, margins


@pytest.mark.parametrize("size", [1, 5, 100])
def test_diffusion_dpo_is_its_definition(size):
    changes = {"dpo": {"beta": 20.0}, "forward": {"draws": 4}, "size": size}
    engine, groups = moved("diffusion_dpo", **changes)
    model = model_of(engine)
    pairs = [dpo(draws_of(model, engine.config, g), draws_of(loaded(), engine.config, g)) for g in groups]
    losses, margins = [x for pair, _ in pairs for x in pair], [x for _, pair in pairs for x in pair]
    metrics, got = trained(engine, groups)
    assert_gradients(got, gradients_of(torch.stack(losses).mean(), model), atol=2e-6)
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert metrics["margin"] == pytest.approx(sum(margins) / 8, rel=1e-4)
    assert metrics["accuracy"] == sum(m > 0 for m in margins) / 8


def test_under_lora_the_reference_is_the_model_without_adapters():
    """Applies the chain rule of W + s B A: dL/dA = s B^T G, dL/dB = s G A^T, with G the gradient of the merged
    weight."""
    changes = {"dpo": {"beta": 20.0}, "forward": {"draws": 4}, "lora": {"rank": 2, "alpha": 4.0}}
    engine, groups = moved("diffusion_dpo", **changes)
    adapters = {name: p.detach().double() for name, p in engine._model.trainable.items()}
    halves = {
        name.replace(".lora_A", ""): (p, adapters[name.replace("lora_A", "lora_B")])
        for name, p in adapters.items()
        if "lora_A" in name
    }
    model = loaded()
    with torch.no_grad():
        for name, (down, up) in halves.items():
            model.get_parameter(name).add_(2.0 * up @ down)
    pairs = [dpo(draws_of(model, engine.config, g), draws_of(loaded(), engine.config, g))[0] for g in groups]
    whole = gradients_of(torch.stack([x for pair in pairs for x in pair]).mean(), model)
    expected = {}
    for name, (down, up) in halves.items():
        stem = name.removesuffix(".weight")
        expected[f"{stem}.lora_A.weight"] = 2.0 * up.T @ whole[name]
        expected[f"{stem}.lora_B.weight"] = 2.0 * whole[name] @ down.T
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected, atol=2e-6)
    assert abs(metrics["margin"]) > 1e-4


BUCKETS = [
    {"sampling": {}},
    {"sampling": {"height": 64, "width": 64}},
    {"sampling": {"width": 16, "true_cfg_scale": 3.0}},
]


def drawn(config: Config, bucket: int) -> Config:
    """Returns the configuration of a run that draws this bucket alone."""
    alone = msgspec.structs.replace(config.rollout, sampling=config.rollout.specs[bucket], buckets=())
    return msgspec.structs.replace(config, rollout=alone)


def groups_of(config: Config) -> list[tuple[Config, GroupBatch]]:
    alone = [drawn(config, bucket) for bucket in range(len(BUCKETS))]
    return [(config, tiny_group(TinyPolicy(), config, seed)) for seed, config in enumerate(alone)]


def test_groups_of_all_buckets_have_the_gradient_of_the_mean_loss():
    engine = started(make_config(buckets=BUCKETS, size=3))
    groups = groups_of(engine.config)
    assert len({group.trajectories[0]["final"].shape for _, group in groups}) == 3
    nudge(engine)
    model = model_of(engine)
    steps = [step for config, group in groups for step in steps_of(model, config, group)]
    losses = [surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.2) for s in steps]
    for _, group in groups:
        engine.accumulate(group, 1 / len(steps))
    assert_gradients(gradients(engine), gradients_of(torch.stack(losses).mean(), model))


def test_final_latents_of_all_buckets_have_the_gradient_of_the_mean_loss():
    ode = {"sde": None, "clip_range": None, "name": "awm"}
    ode |= {"awm": {"weighting": "uniform", "advantage_max": None}}
    engine = started(make_config(**ode, buckets=BUCKETS))
    groups = groups_of(engine.config)
    nudge(engine)
    model = model_of(engine)
    draws = [draw for config, group in groups for draw in draws_of(model, config, group)]
    for _, group in groups:
        engine.accumulate(group, 1 / len(draws))
    assert_gradients(gradients(engine), gradients_of(torch.stack([d.advantage * d.error for d in draws]).mean(), model))


def test_a_spec_that_the_recipe_does_not_have_is_refused():
    engine = started(make_config(buckets=BUCKETS[1:]))
    with pytest.raises(ValueError, match="not one of the recipe's"):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1.0)
