"""Tests samples of several calls in the trainer: their steps are one sample's, whichever call took them."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from omni_async.config.layout import ParallelLayout
from omni_async.training.groups import GroupBatch
from omni_async.training.transition_rows import trained_steps
from tests.support.fakes import share
from tests.training import training_world as world


def joined(first: GroupBatch, second: GroupBatch) -> GroupBatch:
    """Makes the samples of two groups the two calls of one group's samples, stale by one and by two versions."""
    pairs = zip(first.trajectories, second.trajectories, strict=True)
    calls = [TensorDict({"call0": one, "call1": other}, batch_size=[]) for one, other in pairs]
    return replace(first, trajectories=calls, staleness=[[1, 1, 2, 2]] * first.size)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_gradient_is_that_of_all_calls_under_the_samples_advantage(size):
    engine, (first, second) = world.moved(size=size)
    metrics, of_calls = world.trained(engine, joined(first, second))
    engine, (first, second) = world.moved(size=size)
    apart, of_groups = world.trained(engine, first, replace(second, advantages=first.advantages, seeds=first.seeds))
    world.assert_gradients(of_calls, of_groups, rtol=1e-5, atol=1e-7)
    assert metrics["loss"] == pytest.approx(apart["loss"], abs=1e-6)
    assert (metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (1.5, 2)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_objective_of_samples_takes_the_ratio_over_all_calls(size):
    """Uses GSPO: s = exp(mean of Delta over a sample's steps), one surrogate per sample."""
    engine, (first, second) = world.moved(0.02, name="gspo", clip_range=0.005, size=size)
    model, losses = world.model_of(engine), []
    calls = [list(world.steps_of(model, engine.config, group)) for group in (first, second)]
    for i in range(0, 2 * first.size, 2):
        ratios = torch.stack([step.ratio for steps in calls for step in steps[i : i + 2]])
        losses.append(world.surrogate(ratios.log().mean().exp(), first.advantages[i // 2], 0.005))
    expected = world.gradients_of(losses, model)
    _, got = world.trained(engine, joined(first, second))
    world.assert_gradients(got, expected)


def test_the_proximal_pass_finds_the_drift_of_every_step_of_every_call():
    correction = {"mode": "decoupled", "weights": "importance", "level": "sequence"}
    engine, (first, second) = world.moved(correction=correction)
    of_calls = engine.recompute_proximal(joined(first, second))
    apart = [engine.recompute_proximal(group) for group in (first, second)]
    for whole, one, other in zip(of_calls, *apart, strict=True):
        assert whole.log_ratio == pytest.approx(one.log_ratio + other.log_ratio, abs=1e-5)
        assert whole.num_elements == one.num_elements


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", ["flow_grpo", "gspo"])
def test_ranks_with_unequal_shares_train_the_same_calls_in_every_micro_batch(name, size):
    """A denoiser that takes a call with an image apart from one without is then called as often on every rank."""
    engine, (first, second) = world.moved(name=name, clip_range=0.2, size=size, fraction=0.5)
    group = joined(first, second)
    seen = []
    for rank in range(3):  # of four samples one rank has two
        engine._loss._layout = layout = ParallelLayout(rank, 3)
        batches = list(engine._loss.batches(share(group, layout)))
        seen.append([{call for _, call in rows.row_ids} for rows, _ in batches])
    assert seen[0] == seen[1] == seen[2]
    assert all(calls == {0, 1} if name == "gspo" else len(calls) == 1 for calls in seen[0])


def test_conditioning_is_stacked_once_for_the_rows_of_a_call(monkeypatch):
    engine, (first, second) = world.moved(size=100)
    stack, stacked = engine.policy.stack_conditioning, []

    def counted(conditioning):
        stacked.append(len(conditioning))
        return stack(conditioning)

    monkeypatch.setattr(engine.policy, "stack_conditioning", counted)
    for rows, _ in engine._loss.batches(joined(first, second)):
        own = stack([(first, second)[n // 2].trajectories[sample]["conditioning"] for sample, n in rows.row_ids])
        assert len(rows.row_ids) == 8 and (rows.conditioning == own).all()
    assert stacked == [4, 4], "two calls of four samples, not sixteen rows"


def test_a_fraction_of_the_steps_is_a_fraction_of_every_call():
    for seed in range(20):
        steps = trained_steps(seed, 4, 0.5, calls=3)
        assert [step // 4 for step in steps] == [0, 0, 1, 1, 2, 2] and steps == sorted(set(steps))
        assert steps[:2] == trained_steps(seed, 4, 0.5)
    assert trained_steps(0, 2, 1.0, calls=2) == [0, 1, 2, 3]


def test_calls_that_one_sample_lacks_are_refused():
    engine, (first, second) = world.moved()
    group = joined(first, second)
    short = TensorDict({"call0": first.trajectories[1]}, batch_size=[])
    with pytest.raises(ValueError, match=r"trajectory 1 of 4: it has 1 calls, the first has 2"):
        engine.accumulate(replace(group, trajectories=[group.trajectories[0], short, *group.trajectories[2:]]), 1.0)
    wrong = group.trajectories[2].clone()
    wrong["call1", "sigmas"] = wrong["call1", "sigmas"] * 0.9
    with pytest.raises(ValueError, match=r"trajectory 2 of 4: sigmas differ from the trainer's"):
        engine.accumulate(replace(group, trajectories=[*group.trajectories[:2], wrong, group.trajectories[3]]), 1.0)
