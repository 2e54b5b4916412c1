"""Tests objectives of final latents in the engine: draws, whole samples, pairs and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput
from omni_async.algorithms.registry import find_objective
from omni_async.config.schema import Config
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.forward_loss import make_draws
from omni_async.training.groups import GroupBatch
from tests.support.fakes import TinyPolicy, load_model, tiny_group
from tests.training import training_world as world

SCHEDULE = [1.0, 0.8, 0.6, 0.4, 0.2]


def loaded() -> nn.Module:
    return load_model(TinyPolicy(), torch.float64)


def at_end(name: str, **changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    """Returns an engine of an objective of final latents, away from the weights that were loaded, and two groups."""
    return world.moved(**{"sde": None, "clip_range": None, "cfg": 2.0, "name": name, **changes})


def computed(
    config: Config, group: GroupBatch, model: nn.Module, progress: float = 0.0, **others: nn.Module
) -> ObjectiveOutput:
    """Computes the objective of all draws in float64; `others` are models of further policies, else the loaded one."""
    a, rows = config.algorithm, list[dict[str, Tensor]]()
    objective = find_objective(a.name)
    models = {name: others.get(name, loaded()) for name in objective.auxiliary(a)}
    for t, seed, advantage in zip(group.trajectories, group.seeds, group.advantages, strict=True):
        drawn = make_draws(seed, tuple(t["final"].shape), t["sigmas"], a.forward, a.timestep_fraction)
        final = t["final"].double()
        for sigma, noise in zip(drawn.sigmas.double(), drawn.noises.double(), strict=True):
            point = (1 - sigma) * final + sigma * noise
            row = {"final": final, "noise": noise, "sigma": sigma, "advantage": torch.tensor(advantage).double()}
            row["velocity"] = world.guided(model, config, t, point, sigma)
            for name, other in models.items():
                field = f"{name.replace('erence', '')}_velocity"
                row[field] = world.guided(other, config, t, point, sigma).detach()
            rows.append(row)
    draws = len(drawn.sigmas)
    if objective.kind == "preference":
        rows = [row for pair in zip(rows[:draws], rows[draws:], strict=True) for row in pair]
    stacked = {field: torch.stack([row[field] for row in rows]) for field in rows[0]}
    return objective.load()(ForwardInputs(**stacked, draws=draws, progress=progress), a)


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


def test_unusable_groups_are_refused_before_any_gradient():
    engine, _ = at_end("diffusion_dpo")
    with pytest.raises(ValueError, match="diffusion_dpo trains on pairs, got 4 samples"):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1.0)
    assert world.gradients(engine) == {}
    engine, groups = at_end("diffusion_nft")
    del groups[0].trajectories[3]["final"]
    with pytest.raises(ValueError, match=r"trajectory 3 of 4: the fields \['final'\] are missing"):
        engine.accumulate(groups[0], 1.0)
    assert world.gradients(engine) == {}


def test_samples_that_no_policy_made_are_fresh_and_the_oldest_step_counts():
    engine, groups = at_end("diffusion_nft")
    metrics = world.step_on(engine, replace(groups[0], staleness=[[], [2, 1, 1, 1, 0], [0] * 5, []]))
    assert (metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (0.5, 2)
    with pytest.raises(TrainingError, match="diffusion_nft has no ratio to the policy that made a sample"):
        engine.recompute_proximal(groups[0])


AWM = {"kl_coef": 0.2, "fraction": 0.6, "ema": {"every": 1}, "size": 5}
AWM_CLIP = {"ema_coef": 0.7, "clip_range": 0.02}
DPO = {"dpo": {"beta": 20.0}, "forward": {"draws": 4}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("diffusion_nft", {"nft": {"beta": 0.3}, "kl_coef": 0.5, "fraction": 0.6, "size": 5}),
        ("awm", {**AWM, "awm": {**AWM_CLIP, "ratio": "exp_first", "off_policy": True}}),
        ("awm", {**AWM, "awm": {**AWM_CLIP, "ratio": "sum_first", "off_policy": True}}),
        ("awm", {**AWM, "awm": AWM_CLIP}),
        ("diffusion_dpo", {**DPO, "size": 1}),
        ("diffusion_dpo", {**DPO, "size": 5}),
    ],
)
def test_gradients_and_metrics_are_those_of_the_objective(name, changes):
    engine, groups = at_end(name, **changes)
    model = world.model_of(engine)
    outputs = [computed(engine.config, group, model) for group in groups]
    loss = torch.cat([output.loss for output in outputs]).mean()
    metrics, got = world.trained(engine, *groups)
    world.assert_gradients(got, world.gradients_of(loss, model), atol=2e-6)
    expected = {key: torch.cat([output.metrics[key] for output in outputs]).mean().item() for key in outputs[0].metrics}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)


def test_the_pull_to_the_average_changes_over_the_run():
    changes = {"awm": {"ema_coef": 1.0, "ema_coef_end": 0.3}, "ema": {"every": 1}, "trainer.updates": 2}
    engine, groups = at_end("awm", **changes, steps_per_update=2)
    for progress in (0.0, 0.0, 0.5, 0.5, 1.0):
        average, model = loaded(), world.model_of(engine)
        average.load_state_dict(world.auxiliary_of(engine, "ema"))
        losses = torch.cat([computed(engine.config, group, model, progress, ema=average).loss for group in groups])
        world.assert_gradients(world.trained(engine, *groups)[1], world.gradients_of(losses.mean(), model), atol=1e-6)


def test_under_lora_the_reference_is_the_model_without_adapters():
    """Applies the chain rule of W + s B A to G, the gradient of the merged weight: s B^T G and s G A^T."""
    engine, groups = at_end("diffusion_dpo", **DPO, lora=world.LORA)
    adapters = {name: p.detach().double() for name, p in engine._model.trainable.items()}
    layers = [name.removesuffix(".lora_A.weight") for name in adapters if "lora_A" in name]
    halves = {layer: [adapters[f"{layer}.lora_{half}.weight"] for half in "AB"] for layer in layers}
    model = loaded()
    with torch.no_grad():
        for layer, (down, up) in halves.items():
            model.get_parameter(f"{layer}.weight").add_(2.0 * up @ down)
    losses = torch.cat([computed(engine.config, group, model).loss for group in groups])
    whole = world.gradients_of(losses.mean(), model)
    expected = {}
    for layer, (down, up) in halves.items():
        expected[f"{layer}.lora_A.weight"] = 2.0 * up.T @ whole[f"{layer}.weight"]
        expected[f"{layer}.lora_B.weight"] = 2.0 * whole[f"{layer}.weight"] @ down.T
    metrics, got = world.trained(engine, *groups)
    world.assert_gradients(got, expected, atol=2e-6)
    assert abs(metrics["margin"]) > 1e-4


BUCKETS = [
    {"sampling": {}},
    {"sampling": {"height": 64, "width": 64}},
    {"sampling": {"width": 16, "true_cfg_scale": 3.0}},
]


def clipped(model: nn.Module, config: Config, group: GroupBatch) -> list[Tensor]:
    return [world.surrogate(s.ratio, s.advantage) for s in world.steps_of(model, config, group)]


def of_draws(model: nn.Module, config: Config, group: GroupBatch) -> list[Tensor]:
    return list(computed(config, group, model).loss)


ODE = {"sde": None, "clip_range": None, "name": "awm"}


@pytest.mark.parametrize(("changes", "losses"), [({"size": 3}, clipped), (ODE, of_draws)])
def test_groups_of_all_buckets_have_the_gradient_of_the_mean_loss(changes, losses):
    engine = world.engine(buckets=BUCKETS, **changes)
    rollout, groups, rows = engine.config.rollout, [], []
    world.nudge(engine)
    model = world.model_of(engine)
    for seed, spec in enumerate(rollout.specs):
        alone = msgspec.structs.replace(rollout, sampling=spec, buckets=())
        config = msgspec.structs.replace(engine.config, rollout=alone)  # of a run that draws this bucket alone
        groups.append(tiny_group(TinyPolicy(), config, seed))
        rows += losses(model, config, groups[-1])
    assert len({group.trajectories[0]["final"].shape for group in groups}) == 3
    world.assert_gradients(world.trained(engine, *groups)[1], world.gradients_of(rows, model))


def test_a_spec_that_the_recipe_does_not_have_is_refused():
    engine = world.engine(buckets=BUCKETS[1:])
    with pytest.raises(ValueError, match="not one of the recipe's"):
        engine.accumulate(world.group_of(engine), 1.0)
