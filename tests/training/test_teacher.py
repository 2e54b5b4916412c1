"""Tests the teacher: its term in the loss, alone and added, its weights, and what is refused."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from omni_async.training.engine import TrainEngine
from omni_async.weights.shards import whole
from tests.support.fakes import TinyPolicy, load_model
from tests.training import training_world as world

TEACHER = {"path": "1", "coef": 2.0}
DISTILL: dict[str, Any] = {"name": "distill", "clip_range": None, "correction": {}, "teacher": TEACHER}


def kls(engine: TrainEngine, groups: list[Any], steps: list[world.Step], form: str = "published") -> list[torch.Tensor]:
    """Returns the KL of every step to the same step of the teacher, written out in float64."""
    teacher, config = load_model(TinyPolicy("1")).double(), engine.config
    scale = config.algorithm.teacher.sampling.get("true_cfg_scale", config.rollout.sampling.true_cfg_scale)
    sampling = replace(config.rollout.sampling, true_cfg_scale=scale)
    config = replace(config, rollout=replace(config.rollout, sampling=sampling))
    taught = [step for group in groups for step in world.steps_of(teacher, config, group)]
    assert [(one.sample, one.position) for one in steps] == [(one.sample, one.position) for one in taught]
    widths = {"published": lambda step: 2 * step.std**2, "exact": lambda step: 2 * step.scale**2, "mean": lambda _: 1.0}
    return [
        (step.mean - goal.mean.detach()).square().mean() / widths[form](step)
        for step, goal in zip(steps, taught, strict=True)
    ]


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("published", {"size": 3}),
        ("exact", {"size": 16, "cfg": 3.0, "trainer.groups_per_micro_batch": 2}),
        ("mean", {"size": 1, "teacher": TEACHER | {"sampling": {"true_cfg_scale": 3.0}}}),
    ],
)
def test_distill_has_the_gradient_of_the_kl_to_the_teacher_however_rows_are_dealt(form, changes):
    engine, groups = world.moved(**DISTILL | changes, kl_form=form)
    values: list[float] = []

    def losses(steps: list[world.Step]) -> list[torch.Tensor]:
        found = kls(engine, groups, steps, form)
        values.extend(one.item() for one in found)
        return [TEACHER["coef"] * one for one in found]

    metrics = world.assert_trains(engine, groups, losses)
    mean = sum(values) / len(values)
    assert metrics["kl_teacher"] == pytest.approx(mean, rel=1e-5)
    assert metrics["loss"] == pytest.approx(2 * mean, rel=1e-5)


def test_the_loss_of_distill_reads_neither_advantages_nor_the_automatic_correction():
    (engine, groups), (other, _) = world.moved(**DISTILL), world.moved(**DISTILL, **{"staleness.max_updates": 8})
    assert other.config.correction.mode == "bypass"
    for group in groups:
        group.advantages[:] = [0.0] * len(group.advantages)
    (metrics, gradients), (found, of_other) = world.trained(engine, *groups), world.trained(other, *groups)
    assert gradients and found == metrics and not any(name.startswith("weight") for name in metrics)
    world.assert_close(of_other, gradients)


@pytest.mark.parametrize("correction", [{"mode": "bypass"}, {"mode": "decoupled", "weights": "importance"}])
def test_an_added_term_is_not_multiplied_by_the_correction(correction):
    plain, groups = world.moved(correction=correction, size=3)
    engine, _ = world.moved(correction=correction, size=3, teacher=TEACHER)
    model = world.model_of(engine)
    steps = [step for group in groups for step in world.steps_of(model, engine.config, group)]
    term = world.gradients_of([2 * one for one in kls(engine, groups, steps)], model)
    (_, without), (metrics, found) = world.trained(plain, *groups), world.trained(engine, *groups)
    world.assert_gradients(found, {name: without[name] + term[name] for name in term}, atol=1e-6)
    assert metrics["kl_teacher"] > 0.01 and "kl_ref" not in metrics


@pytest.mark.sliced(floor=2)
@world.backends
@world.loras
def test_a_teacher_of_the_same_weights_has_no_distance_and_another_none_that_training_changes(backend, lora):
    same = world.engine(**DISTILL | {"teacher": {"path": "0"}}, lora=lora, backend=backend)
    assert world.update(same)["kl_teacher"] < 1e-12  # attention kernels differ with and without gradient
    engine = world.engine(**DISTILL, lora=lora, backend=backend, lr=0.05)
    before = {name: p.clone() for name, p in load_model(TinyPolicy("1")).named_parameters()}
    distances = [world.update(engine, seed % 3)["kl_teacher"] for seed in range(12)]
    assert distances[-1] < 0.5 * distances[0]
    teacher = {name.removeprefix("teacher."): whole(one) for name, one in engine._model.teacher.tensors().items()}
    world.assert_close(teacher, before)
    base = {name: p.detach() for name, p in load_model(TinyPolicy("0")).named_parameters()}
    if lora is not None:  # the frozen weights are the policy's again after every use of the teacher
        world.assert_close({name: whole(one) for name, one in engine._model.base().items()}, base)


def test_a_checkpoint_holds_no_teacher_and_continues_with_one(tmp_path):
    engine = world.updated(1, **DISTILL)
    assert world.auxiliaries(engine) == {}
    world.save(engine, tmp_path / "c")
    expected = world.update(engine, 1)
    resumed = world.engine(**DISTILL)
    world.load(resumed, tmp_path / "c")
    assert world.update(resumed, 1) == expected


def test_there_is_a_teacher_only_with_a_term_for_it():
    assert world.engine()._model.teacher is None


class Wider(TinyPolicy):
    """A policy whose checkpoint 1 has a wider layer, and whose checkpoint 2 lacks one."""

    def load_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        found = super().load_components(dtype)
        if self.path == "1":
            found["transformer"].img_in = torch.nn.Linear(4, 17)
        if self.path == "2":
            del found["transformer"].proj_out
        return found


@world.backends
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("1", r"transformer\.img_in\.weight has the shape \(17, 4\), and \(16, 4\) in 0"),
        ("2", r"it lacks transformer\.proj_out\.bias; expected the architecture of 0"),
    ],
)
def test_a_teacher_of_another_architecture_is_refused_with_the_first_difference(backend, path, message):
    config = world.make_config(**DISTILL | {"teacher": {"path": path}}, backend=backend)
    with pytest.raises(ValueError, match=rf"^algorithm\.teacher\.path: {path}: {message}$"):
        world.started(config, Wider("0"))
