"""Tests that an update trains groups of several specs, each with its own shape, schedule and guidance."""

import pytest
import torch
from msgspec.structs import replace

from omni_async.config import Config
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy, tiny_group
from tests.training.engines import assert_gradients, gradients, make_config, nudge, started
from tests.training.plain import gradients_of, model_of, steps_of, surrogate
from tests.training.test_forward_objectives import draws_of

BUCKETS = [
    {"sampling": {}},
    {"sampling": {"height": 64, "width": 64}},
    {"sampling": {"width": 16, "true_cfg_scale": 3.0}},
]


def drawn(config: Config, bucket: int) -> Config:
    """Returns the configuration of a run that draws this bucket alone."""
    return replace(config, rollout=replace(config.rollout, sampling=config.rollout.specs[bucket], buckets=()))


def groups_of(config: Config) -> list[tuple[Config, GroupBatch]]:
    alone = [drawn(config, bucket) for bucket in range(len(BUCKETS))]
    return [(config, tiny_group(TinyPolicy(), config, seed)) for seed, config in enumerate(alone)]


def test_groups_of_all_buckets_have_the_gradient_of_the_mean_loss():
    engine = started(make_config(**{"rollout.buckets": BUCKETS, "trainer.micro_batch_size": 3}))
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
    ode = {"rollout.sde": None, "algorithm.clip_range": None, "algorithm.name": "awm"}
    ode |= {"algorithm.awm": {"weighting": "uniform", "advantage_max": None}}
    engine = started(make_config(**ode, **{"rollout.buckets": BUCKETS}))
    groups = groups_of(engine.config)
    nudge(engine)
    model = model_of(engine)
    draws = [draw for config, group in groups for draw in draws_of(model, config, group)]
    for _, group in groups:
        engine.accumulate(group, 1 / len(draws))
    assert_gradients(gradients(engine), gradients_of(torch.stack([d.advantage * d.error for d in draws]).mean(), model))


def test_a_spec_that_the_recipe_does_not_have_is_refused():
    engine = started(make_config(**{"rollout.buckets": BUCKETS[1:]}))
    with pytest.raises(ValueError, match="not one of the recipe's"):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config), 1.0)
