import pytest

from omni_async.algorithms.objectives.flow_grpo import ObjectiveSettings, flow_grpo
from omni_async.algorithms.registry import find_objective, register_objective


def test_flow_grpo_is_found_with_the_fields_it_needs():
    objective = find_objective("flow_grpo")
    assert objective.compute is flow_grpo
    objective.check_fields({"latents", "log_probs", "conditioning", "means", "sigmas", "steps"})


def test_a_missing_field_is_named_with_its_objective():
    with pytest.raises(ValueError, match=r"'flow_grpo' needs .*\['log_probs'\].*missing; got \['conditioning', 'latents'\]"):
        find_objective("flow_grpo").check_fields(["latents", "conditioning"])


def test_only_the_loss_without_kl_scales_with_the_advantage():
    objective = find_objective("flow_grpo")
    assert objective.homogeneous(ObjectiveSettings(clip_range=1e-4))
    assert not objective.homogeneous(ObjectiveSettings(clip_range=1e-4, kl_coef=0.04))


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of \['flow_grpo'.*\], got 'ppo'"):
        find_objective("ppo")


def test_a_name_is_registered_once():
    find_objective("flow_grpo")
    with pytest.raises(ValueError, match="'flow_grpo' is already registered"):
        register_objective("flow_grpo", fields=(), homogeneous=lambda settings: True)(flow_grpo)
