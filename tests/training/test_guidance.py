"""Tests classifier-free guidance in training: with or without gradient through the unconditional branch."""

import pytest
import torch

from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from tests.fakes import TinyPolicy, tiny_group
from tests.training.engines import assert_gradients, log_probs, make_config, nudge, started, stepped
from tests.training.plain import gradients_of, model_of, steps_of, surrogate

MINE = {"rollout.sampling.true_cfg_scale": 3.0, "trainer.micro_batch_size": 3}


def nudged(config: Config) -> TrainEngine:
    engine = started(config)
    nudge(engine)
    return engine


@pytest.mark.parametrize("through", [True, False])
def test_the_gradient_is_that_of_a_detached_or_whole_unconditional_branch(through):
    engine = nudged(make_config(**MINE, **{"algorithm.unconditional_gradient": through}))
    group = tiny_group(TinyPolicy(), engine.config)
    model = model_of(engine)
    steps = steps_of(model, engine.config, group, detached_uncond=not through)
    losses = [surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.2) for s in steps]
    engine.accumulate(group, 1 / 8)
    assert_gradients(stepped(engine)[1], gradients_of(torch.stack(losses).mean(), model))


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_detaching_changes_the_gradient_but_no_value(backend, lora):
    metrics = []
    for through in (True, False):
        changes = {"algorithm.unconditional_gradient": through, "trainer.backend": backend, "model.lora": lora}
        engine = started(make_config(**MINE, **changes))
        group = tiny_group(TinyPolicy(), engine.config)
        assert (log_probs(engine, group) - torch.stack([t["log_probs"] for t in group.trajectories])).abs().max() < 1e-6
        engine.accumulate(group, 1 / 8)
        metrics.append(engine.step())
    assert abs(metrics[0].pop("grad_norm") / metrics[1].pop("grad_norm") - 1) > 1e-3
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)
