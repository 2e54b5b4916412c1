"""Tests that the engine's gradient is the definition's, and what the engine refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from omni_async.algorithms.kinds import num_trained
from omni_async.algorithms.objectives.base import ObjectiveOutput
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.transition_rows import trained_steps
from tests.support.fakes import TinyPolicy
from tests.training import training_world as world


def clipped(steps: list[world.Step]) -> list[torch.Tensor]:
    return [world.surrogate(s.ratio, s.advantage) for s in steps]


@pytest.mark.parametrize(("cfg", "through"), [(1.0, True), (3.0, True), (3.0, False)])
def test_the_gradient_is_that_of_the_mean_loss(cfg, through):
    engine, groups = world.moved(0.02, cfg=cfg, unconditional_gradient=through, size=3)
    world.assert_trains(engine, groups, clipped)


def test_the_step_is_the_optimizers_and_micro_batches_do_not_matter():
    results = []
    for size in (1, 3, 8, 100):
        engine = world.engine(**{"size": size, "optimizer": "sgd", "trainer.optimizer.weight_decay": 0.0})
        world.nudge(engine)
        before, names = world.weights(engine), engine._model.trainable
        metrics, gradient = world.trained(engine, world.group_of(engine))
        step = torch.cat([1e-2 * gradient.get(name, torch.zeros_like(p)).flatten() for name, p in names.items()])
        torch.testing.assert_close(world.weights(engine), before - step, rtol=0, atol=1e-7)
        results.append((world.weights(engine), metrics))
    for values, metrics in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=0, atol=1e-6)
        assert metrics == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)


def test_scaling_gradients_is_scaling_advantages_and_comes_before_clipping():
    config = world.make_config(**{"optimizer": "sgd", "trainer.optimizer.max_grad_norm": 0.05})
    scaled, direct = world.started(config), world.started(config)
    group = world.group_of(scaled)
    metrics = world.step_on(scaled, group, grad_scale=2.5)
    expected = world.step_on(direct, replace(group, advantages=[2.5 * a for a in group.advantages]))
    torch.testing.assert_close(world.weights(scaled), world.weights(direct), rtol=0, atol=1e-7)
    assert metrics["grad_norm"] > 0.05
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("by", ["drift", "ess"])
def test_drift_lowers_the_rate_of_its_own_step(by):
    sgd = {"trainer.optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 0, "max_grad_norm": None}}
    plain, groups = world.moved(**sgd)
    before = world.weights(plain)
    metrics = world.step_on(plain, *groups)
    measured = metrics["ess"] if by == "ess" else metrics["log_ratio_nats/variance"] / 2
    for factor in (0.5, 1.0):
        target = measured / factor**2 if by == "ess" else measured * factor**2
        sgd["trainer.optimizer"]["step_size"] = {"by": by, "target": target}
        engine, _ = world.moved(**sgd)
        found = world.step_on(engine, *groups)
        assert found == metrics | {"lr": pytest.approx(1e-2 * factor), "lr_factor": pytest.approx(factor)}
        step = factor * (world.weights(plain) - before)
        assert step.abs().max() > 1e-4
        torch.testing.assert_close(world.weights(engine) - before, step, rtol=0, atol=2e-7)


def test_gradients_are_clipped_by_what_the_alignment_leaves():
    sgd = {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0, "max_grad_norm": 1e-3, "max_alignment": 0.1}
    engine, groups = world.moved(**{"trainer.optimizer": sgd})
    assert world.step_on(engine, groups[0])["alignment"] == 0
    metrics, grads = world.trained(engine, groups[1])
    assert metrics["alignment"] > 0.1
    assert metrics["grad_norm"] > 1e-3
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("correction", [{"mode": "bypass"}, {"mode": "decoupled", "kappa_nats": 0.15}])
def test_discarding_forgets_gradients_metrics_and_the_normaliser(correction):
    (engine, groups), (fresh, _) = world.moved(correction=correction), world.moved(correction=correction)
    engine.accumulate(groups[1], 1.0)
    engine.discard()
    assert world.step_on(engine, groups[0]) == world.step_on(fresh, groups[0])
    assert torch.equal(world.weights(engine), world.weights(fresh))


def test_on_policy_samples_have_ratio_one():
    metrics = world.update(world.engine(size=1))
    assert metrics["log_ratio_nats/absmax"] < 1e-4
    assert metrics["kappa_nats"] < 1e-8
    assert metrics["ess"] == pytest.approx(1, abs=1e-6)
    assert (metrics["clip_fraction"], metrics["lr"]) == (0, 1e-2)
    others = {"loss", "ratio_deviation", "approx_kl", "advantage_abs", "grad_norm", "log_ratio_nats/variance/step_02"}
    assert others <= metrics.keys()


@world.loras
def test_kl_to_the_reference_is_zero_at_the_start_and_grows(lora):
    engine = world.engine(kl_coef=0.1, lora=lora)
    assert world.update(engine)["kl_ref"] < 1e-12  # attention kernels differ with and without gradient
    assert world.update(engine)["kl_ref"] > 1e-6


def test_non_finite_gradients_stop_the_run_and_leave_the_weights():
    engine = world.engine()
    before = world.weights(engine)
    engine.accumulate(world.group_of(engine), float("inf"))
    with pytest.raises(TrainingError, match=r"optimizer step 0: the gradient norm is (nan|inf)"):
        engine.step()
    assert torch.equal(world.weights(engine), before)
    engine.discard()
    with pytest.raises(TrainingError, match="no group was accumulated"):
        engine.step()
    world.update(engine)
    assert world.weights(engine).isfinite().all(), "nothing of it is left behind"


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("log_probs", None, r"trajectory 1 of 4: the fields \['log_probs'\] are missing"),
        ("latents", lambda t: t[:-1], r"latents must be torch.float32 of shape \(3, 6, 4\)"),
        ("latents", lambda t: t.bfloat16(), r"latents must be torch.float32"),
        ("log_probs", lambda t: t.float(), r"log_probs must be torch.float64 of shape \(2,\), got torch.float32"),
        ("latents", lambda t: t * float("nan"), "latents has values that are not finite"),
        ("sigmas", lambda t: torch.nextafter(t, t + 1), r"differ from the trainer's schedule: sigmas\[0\]"),
        ("sigmas", lambda t: t[1:], "sigmas must be torch.float32 of shape"),
        ("steps", lambda t: t + 3, r"steps must be in \[0, 4\]"),
    ],
)
def test_unusable_trajectories_are_refused_before_any_gradient(field, change, message):
    engine = world.engine()
    group = world.group_of(engine)
    value = group.trajectories[1].pop(field)
    if change is not None:
        group.trajectories[1][field] = change(value)
    with pytest.raises(ValueError, match=message):
        engine.accumulate(group, 1.0)
    assert world.gradients(engine) == {}


def test_bfloat16_compute_keeps_float32_master_weights():
    for backend in ("plain", "fsdp2"):
        engine = world.engine(dtype="bfloat16", backend=backend, lr=1e-5)
        assert 0 < world.update(engine)["log_ratio_nats/absmax"] < 2
        assert {p.dtype for p in engine._model.trainable.values()} == {torch.float32}
        assert {spec.dtype for spec in world.export(engine, 1)[0].tensors} == {"bfloat16"}


def test_gradient_checkpointing_needs_a_model_that_can():
    config = world.make_config(checkpointing=True)
    with pytest.raises(ValueError, match="TinyTransformer does not support it"):
        world.started(config)

    class Able(TinyPolicy):
        def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
            found = super().load_components(dtype)
            for model in found.values():
                model.enable_gradient_checkpointing = partial(setattr, model, "enabled", True)
            return found

    assert world.started(config, Able())._model.components["transformer"].enabled


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda i: ObjectiveOutput(i.log_prob.mean(), {}), r"its loss has shape \(\), expected \(8,\)"),
        (lambda i: ObjectiveOutput(i.log_prob[:, None] - i.log_prob, {}), r"its loss has shape \(8, 8\), expected"),
        (lambda i: ObjectiveOutput(i.log_prob, {"two": i.std[:2]}), r"its metric two has shape \(2,\), expect"),
        (lambda i: ObjectiveOutput(i.log_prob, {"one": 1.0}), r"its metric one is a float, expected a tensor of"),
        (lambda i: ObjectiveOutput(i.log_prob.detach(), {}), "its loss has no gradient"),
        (lambda i: i.log_prob, "returned a Tensor, expected an ObjectiveOutput"),
        (lambda i: {}["nothing"], r"failed: KeyError: 'nothing' \(test_engine.py, line \d+\)"),
    ],
)
def test_an_objective_that_does_not_return_numbers_per_row_is_refused_by_name(compute, said):
    engine = world.engine()
    engine._loss._compute = lambda inputs, algorithm: compute(inputs)
    with pytest.raises(TrainingError, match=r"objective flow_grpo \(omni_async\.[a-z_.]+:[a-z_]+\).*" + said):
        world.update(engine)


@pytest.mark.parametrize(
    ("window", "fraction", "count"),
    [(4, 1.0, 4), (4, 0.5, 2), (4, 0.74, 2), (4, 0.01, 1), (10, 0.3, 3), (50, 0.58, 29), (3, 1 / 3, 1)],
)
def test_a_share_is_rounded_down_but_at_least_one(window, fraction, count):
    assert num_trained(window, fraction) == count


@given(seed=st.integers(0, 2**63 - 1), window=st.integers(1, 12), fraction=st.floats(0.01, 1.0))
def test_a_draw_is_without_replacement_in_order_and_the_seeds_alone(seed, window, fraction):
    chosen = trained_steps(seed, window, fraction)
    assert chosen == sorted(set(chosen)) == trained_steps(seed, window, fraction)
    assert len(chosen) == num_trained(window, fraction)
    assert set(chosen) <= set(range(window))
    assert trained_steps(seed, window, 1.0) == list(range(window))


def test_every_step_is_drawn_as_often_as_every_other():
    drawn = Counter(k for seed in range(3000) for k in trained_steps(seed, 4, 0.5))
    assert drawn.keys() == {0, 1, 2, 3}
    assert all(abs(count - 1500) < 5 * (3000 * 0.25) ** 0.5 for count in drawn.values())


def fractional(size: int = 3, **changes: object) -> tuple[TrainEngine, GroupBatch, list[list[int]]]:
    """Returns an engine that trains half of 4 steps, a group, and the positions that are trained."""
    engine = world.engine(fraction=0.5, size=size, **changes)
    group = replace(world.group_of(engine, 0, range(4)), staleness=[[10 * i + k for k in range(4)] for i in range(4)])
    world.nudge(engine)
    chosen = [trained_steps(seed, 4, 0.5) for seed in group.seeds]
    assert len(set(map(tuple, chosen))) > 1
    return engine, group, chosen


@pytest.mark.parametrize("size", [1, 3, 100])
def test_gradient_weights_and_drift_are_of_the_chosen_rows_in_order(size):
    engine, group, chosen = fractional(size)
    world.assert_trains(engine, [group], clipped, chosen)

    engine, group, chosen = fractional(size, correction={"mode": "decoupled"})
    steps = list(world.steps_of(world.model_of(engine), engine.config, group, chosen))
    ages = [row for rows, _ in engine._loss.batches(group) for row in rows.staleness.tolist()]
    assert ages == [10 * s.sample + s.position for s in steps]
    drifts = engine.recompute_proximal(group)
    assert [x for d in drifts for x in d.log_ratio] == pytest.approx([s.nats for s in steps], abs=2e-5)
    expected = torch.stack([s.log_prob for s in steps]).detach().reshape(4, 2)
    torch.testing.assert_close(world.log_probs(engine, group).double(), expected, rtol=0, atol=1e-6)
    given = [[0.5, 1.5], [0.0, 2.0], [1.0, 0.25], [0.75, 3.0]]

    def weighted(steps: list[world.Step]) -> list[torch.Tensor]:
        return [-w * s.advantage * s.log_prob for w, s in zip(torch.tensor(given).flatten(), steps, strict=True)]

    world.assert_trains(engine, [replace(group, weights=given)], weighted, chosen)
