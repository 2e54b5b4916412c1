"""Tests that the engine's gradient is the definition's, however rows are cut and whichever of a window's steps are
trained; and what it refuses."""

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
from omni_async.layout import ParallelLayout
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.transition_loss import trained_steps
from tests.fakes import TinyPolicy, tiny_group
from tests.training.training_world import (
    CPU,
    assert_gradients,
    export,
    gradients,
    gradients_of,
    log_probs,
    make_config,
    model_of,
    nudge,
    started,
    stepped,
    steps_of,
    surrogate,
    train,
    weights,
)


def plain_gradient(
    engine: TrainEngine, groups: list[GroupBatch], dtype: torch.dtype, through: bool = True
) -> dict[str, torch.Tensor]:
    """Computes the definition, one row at a time in one graph: the mean over all samples and steps of the clipped
    surrogate. `through`: with gradient through the unconditional branch."""
    model = model_of(engine, dtype)
    steps = [step for g in groups for step in steps_of(model, engine.config, g, detached_uncond=not through)]
    losses = [surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.2) for s in steps]
    return gradients_of(torch.stack(losses).mean(), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cfg", "through"), [(1.0, True), (3.0, True), (3.0, False)])
def test_accumulated_gradient_is_that_of_the_mean_loss(dtype, cfg, through):
    changes = {"cfg": cfg, "unconditional_gradient": through}
    config = make_config(**changes, size=3)
    engine = started(config)
    groups = [tiny_group(TinyPolicy(), config, seed) for seed in (0, 1)]
    nudge(engine)
    for group in groups:
        engine.accumulate(group, 1 / 16)
    assert_gradients(gradients(engine), plain_gradient(engine, groups, dtype, through))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_objective_of_samples_gets_all_their_steps(size):
    """Uses GSPO: s = exp(mean of Delta over a sample's steps), one surrogate per sample."""
    changes = {"name": "gspo", "clip_range": 0.005}
    engine = started(make_config(**changes, size=size))
    group = tiny_group(TinyPolicy(), engine.config)
    nudge(engine)
    model = model_of(engine)
    steps = list(steps_of(model, engine.config, group))
    losses = []
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        mean = ((first.log_prob - first.recorded) + (second.log_prob - second.recorded)) / 2
        losses.append(surrogate(mean.exp(), first.advantage, 0.005))
    engine.accumulate(group, 1 / 8)
    metrics, got = stepped(engine)
    assert_gradients(got, gradients_of(torch.stack(losses).mean(), model))
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)


def test_the_step_is_the_optimizers():
    engine = started(make_config(**{"optimizer": "sgd", "trainer.optimizer.weight_decay": 0.0}))
    groups = [tiny_group(TinyPolicy(), engine.config)]
    before, gradient = weights(engine), plain_gradient(engine, groups, torch.float64)
    train(engine, groups)
    moved = torch.cat(
        [gradient.get(n, torch.zeros_like(p)).float().flatten() for n, p in engine._model.trainable.items()]
    )
    torch.testing.assert_close(weights(engine), before - 1e-2 * moved, rtol=0, atol=1e-7)


def test_micro_batch_size_does_not_matter():
    results = []
    for size in (1, 3, 8, 100):
        engine = started(make_config(size=size, optimizer="sgd"))
        nudge(engine)
        metrics = train(engine, [tiny_group(TinyPolicy(), engine.config)])
        results.append((weights(engine), metrics))
    for values, metrics in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=0, atol=1e-6)
        assert metrics == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)


def test_scaling_gradients_is_scaling_advantages_and_comes_before_clipping():
    config = make_config(**{"optimizer": "sgd", "trainer.optimizer.max_grad_norm": 0.05})
    group = tiny_group(TinyPolicy(), config)
    scaled, direct = started(config), started(config)
    metrics = train(scaled, [group], grad_scale=2.5)
    expected = train(direct, [replace(group, advantages=[2.5 * a for a in group.advantages])])
    torch.testing.assert_close(weights(scaled), weights(direct), rtol=0, atol=1e-7)
    assert metrics["grad_norm"] > 0.05
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_discarding_forgets_gradients_and_metrics():
    config = make_config()
    groups = [tiny_group(TinyPolicy(), config, seed) for seed in (0, 1)]
    engine, fresh = started(config), started(config)
    engine.accumulate(groups[0], 1.0)
    engine.discard()
    assert train(engine, groups[1:]) == train(fresh, groups[1:])
    assert torch.equal(weights(engine), weights(fresh))


def test_on_policy_samples_have_ratio_one():
    engine = started(make_config(size=1))
    metrics = train(engine, [tiny_group(TinyPolicy(), engine.config)])
    assert metrics["log_ratio_nats/absmax"] < 1e-4
    assert metrics["kappa_nats"] < 1e-8
    assert metrics["ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["lr"] == 1e-2
    assert {
        "loss",
        "ratio_deviation",
        "approx_kl",
        "advantage_abs",
        "grad_norm",
        "log_ratio_nats/variance/step_02",
    } <= metrics.keys()


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_kl_to_the_reference_is_zero_at_the_start_and_grows(lora):
    engine = started(make_config(kl_coef=0.1, lora=lora))
    group = tiny_group(TinyPolicy(), engine.config)
    assert train(engine, [group])["kl_ref"] < 1e-12  # attention kernels differ with and without gradient
    assert train(engine, [group])["kl_ref"] > 1e-6


def test_non_finite_gradients_stop_the_run_and_leave_the_weights():
    engine = started(make_config())
    before = weights(engine)
    engine.accumulate(tiny_group(TinyPolicy(), engine.config), float("inf"))
    with pytest.raises(TrainingError, match=r"optimizer step 0: the gradient norm is (nan|inf)"):
        engine.step()
    assert torch.equal(weights(engine), before)
    engine.discard()
    train(engine, [tiny_group(TinyPolicy(), engine.config)])
    assert weights(engine).isfinite().all(), "nothing of it is left behind"


def test_a_step_without_rows_is_an_error():
    with pytest.raises(TrainingError, match="no group was accumulated"):
        started(make_config()).step()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("log_probs", None, r"trajectory 1 of 4: the fields \['log_probs'\] are missing"),
        ("latents", lambda t: t[:-1], r"latents must be torch.float32 of shape \(3, 6, 4\)"),
        ("latents", lambda t: t.bfloat16(), r"latents must be torch.float32"),
        ("latents", lambda t: t * float("nan"), "latents has values that are not finite"),
        ("sigmas", lambda t: torch.nextafter(t, t + 1), r"differ from the trainer's schedule: sigmas\[0\]"),
        ("sigmas", lambda t: t[1:], "sigmas must be torch.float32 of shape"),
        ("steps", lambda t: t + 3, r"steps must lie in \[0, 4\]"),
    ],
)
def test_unusable_trajectories_are_refused_before_any_gradient(field, change, message):
    engine = started(make_config())
    group = tiny_group(TinyPolicy(), engine.config)
    if change is None:
        del group.trajectories[1][field]
    else:
        group.trajectories[1][field] = change(group.trajectories[1][field])
    with pytest.raises(ValueError, match=message):
        engine.accumulate(group, 1.0)
    assert all(p.grad is None for p in engine._model.trainable.values())


def test_sharded_on_one_rank_equals_plain():
    plain = started(make_config(cfg=2.0, backend="plain", kl_coef=0.1))
    fsdp = started(make_config(cfg=2.0, backend="fsdp2", kl_coef=0.1))
    for seed in (0, 1):
        group = tiny_group(TinyPolicy(), plain.config, seed)
        assert train(fsdp, [group]) == pytest.approx(train(plain, [group]), rel=1e-5, abs=1e-6)
    expected = dict(plain._model.components.named_parameters())
    for name, parameter in fsdp._model.components.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name].data, rtol=0, atol=1e-6)


def test_plain_refuses_several_ranks():
    engine = TrainEngine(make_config(backend="plain"), TinyPolicy(), ParallelLayout(0, 2), device=CPU)
    with pytest.raises(ValueError, match=r"trainer\.backend: 'plain' is one rank"):
        engine.setup()


def test_bfloat16_compute_keeps_float32_master_weights():
    for backend in ("plain", "fsdp2"):
        engine = started(make_config(**{"dtype": "bfloat16", "backend": backend, "trainer.optimizer.lr": 1e-5}))
        metrics = train(engine, [tiny_group(TinyPolicy(), engine.config)])
        assert {p.dtype for p in engine._model.trainable.values()} == {torch.float32}
        assert 0 < metrics["log_ratio_nats/absmax"] < 2
        manifest, _ = export(engine, 1)
        assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}


def test_gradient_checkpointing_needs_a_model_that_can():
    config = make_config(checkpointing=True)
    with pytest.raises(ValueError, match="TinyTransformer does not support it"):
        started(config)

    class Able(TinyPolicy):
        def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
            found = super().load_components(dtype)
            for model in found.values():
                model.enable_gradient_checkpointing = partial(setattr, model, "enabled", True)
            return found

    assert started(config, Able())._model.components["transformer"].enabled


def _place(inputs, algorithm):
    return {}["nothing"]


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda i, a: ObjectiveOutput(i.log_prob.mean(), {}), r"its loss has shape \(\), expected \(8,\)"),
        (lambda i, a: ObjectiveOutput(i.log_prob[:, None] - i.log_prob, {}), r"its loss has shape \(8, 8\), expected"),
        (
            lambda i, a: ObjectiveOutput(i.log_prob, {"two": i.advantage[:2]}),
            r"its metric two has shape \(2,\), expect",
        ),
        (lambda i, a: ObjectiveOutput(i.log_prob, {"one": 1.0}), r"its metric one is a float, expected a tensor of"),
        (lambda i, a: ObjectiveOutput(i.log_prob.detach(), {}), "its loss has no gradient"),
        (lambda i, a: i.log_prob, "returned a Tensor, expected an ObjectiveOutput"),
        (_place, r"failed: KeyError: 'nothing' \(test_engine.py, line \d+\)"),
    ],
)
def test_an_objective_that_does_not_return_numbers_per_row_is_refused_by_name(compute, said):
    engine = started(make_config())
    engine._loss._compute = compute
    with pytest.raises(TrainingError, match=r"objective flow_grpo \(omni_async\.[a-z_.]+:[a-z_]+\).*" + said):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1 / 8)


WINDOW = range(0, 4)


@pytest.mark.parametrize(
    ("window", "fraction", "count"),
    [(4, 1.0, 4), (4, 0.5, 2), (4, 0.74, 2), (4, 0.01, 1), (10, 0.3, 3), (50, 0.58, 29), (3, 1 / 3, 1)],
)
def test_a_share_is_rounded_down_but_at_least_one(window, fraction, count):
    assert num_trained(window, fraction) == count


@given(seed=st.integers(0, 2**63 - 1), window=st.integers(1, 12), data=st.data())
def test_a_draw_is_without_replacement_in_order_and_the_seeds_alone(seed, window, data):
    fraction = data.draw(st.floats(0.01, 1.0))
    chosen = trained_steps(seed, window, fraction)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == num_trained(window, fraction)
    assert set(chosen) <= set(range(window))
    assert chosen == trained_steps(seed, window, fraction)
    assert trained_steps(seed, window, 1.0) == list(range(window))


def test_every_step_is_drawn_as_often_as_every_other():
    drawn = Counter(k for seed in range(3000) for k in trained_steps(seed, 4, 0.5))
    assert drawn.keys() == {0, 1, 2, 3}
    assert all(abs(count - 1500) < 5 * (3000 * 0.25) ** 0.5 for count in drawn.values())


def fractional(size: int = 3, **changes: object) -> tuple[TrainEngine, GroupBatch, list[list[int]]]:
    """Returns an engine that trains half of 4 steps, a group with a staleness of its own for every step, and the
    positions that are trained."""
    engine = started(make_config(**{"fraction": 0.5, "size": size, **changes}))
    group = tiny_group(TinyPolicy(), engine.config, 0, WINDOW)
    group = replace(group, staleness=[[10 * i + k for k in WINDOW] for i in range(4)])
    nudge(engine)
    chosen = [trained_steps(seed, 4, 0.5) for seed in group.seeds]
    assert len(set(map(tuple, chosen))) > 1
    return engine, group, chosen


@pytest.mark.parametrize("size", [1, 3, 100])
def test_rows_are_the_chosen_steps_of_every_sample(size):
    engine, group, chosen = fractional(size)
    batches = [rows for rows, _ in engine._loss.batches(group)]
    expected = [(i, k) for i in range(4) for k in chosen[i]]
    assert [step for rows in batches for step in rows.steps] == [k for _, k in expected]
    assert [row_id for rows in batches for row_id in rows.row_ids] == [(i, n) for i in range(4) for n in (0, 1)]
    assert torch.cat([rows.staleness for rows in batches]).tolist() == [10 * i + k for i, k in expected]
    latents, following = (torch.cat([getattr(rows, name) for rows in batches]) for name in ("latents", "next_latents"))
    for row, (i, k) in enumerate(expected):
        assert torch.equal(latents[row], group.trajectories[i]["latents"][k])
        assert torch.equal(following[row], group.trajectories[i]["latents"][k + 1])


def test_the_gradient_is_that_of_the_mean_over_chosen_rows():
    engine, group, chosen = fractional()
    model = model_of(engine)
    losses = [
        surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.2)
        for s in steps_of(model, engine.config, group, chosen)
    ]
    engine.accumulate(group, 1 / 8)
    metrics, got = stepped(engine)
    assert_gradients(got, gradients_of(torch.stack(losses).mean(), model))
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)


def test_weights_and_drift_are_of_the_chosen_rows_in_order():
    engine, group, chosen = fractional(correction={"mode": "decoupled"})
    model = model_of(engine)
    steps = list(steps_of(model, engine.config, group, chosen))
    drifts = engine.recompute_proximal(group)
    assert [x for d in drifts for x in d.log_ratio] == pytest.approx([s.nats for s in steps], abs=2e-5)
    values = log_probs(engine, group)
    assert values.shape == (4, 2)
    torch.testing.assert_close(
        values.flatten().double(), torch.stack([s.log_prob for s in steps]).detach(), rtol=0, atol=1e-6
    )
    weight = [[0.5, 1.5], [0.0, 2.0], [1.0, 0.25], [0.75, 3.0]]
    flat = [w for row in weight for w in row]
    expected = gradients_of(
        torch.stack([-w * s.advantage * s.log_prob for w, s in zip(flat, steps, strict=True)]).mean(), model
    )
    engine.accumulate(replace(group, weights=weight), 1 / 8)
    assert_gradients(stepped(engine)[1], expected)
