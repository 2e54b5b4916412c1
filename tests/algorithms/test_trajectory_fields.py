"""Tests that engines return a sample's means exactly where a gradient depends on them."""

import pytest

from omni_async.algorithms.registry import find_objective
from omni_async.algorithms.trajectory_fields import trajectory_fields
from tests.config.recipe import MINIMAL, load_text

BYPASS, MASKED = "{mode: bypass}", "{mode: decoupled, kappa_nats: 2.0}"


def fields(name: str, *overrides: str) -> list[str]:
    config = load_text(MINIMAL, f"algorithm.name={name}", *overrides)
    return sorted(trajectory_fields(find_objective(name), config))


@pytest.mark.parametrize(
    ("name", "correction", "means"),
    [
        ("flow_grpo", "{}", False),
        ("flow_grpo", BYPASS, False),
        ("flow_grpo", "{mode: decoupled, weights: tempered, k3: 1.0}", False),
        ("flow_grpo", MASKED, True),
        ("gspo", "{mode: none}", False),
        ("gspo", MASKED, True),
        ("grpo_guard", "{}", True),
        ("flow_dppo", BYPASS, True),
        ("flow_dppo", "{mode: decoupled}", False),
        ("grpo_guard", "{mode: none}", False),
        ("flow_dppo", MASKED, True),
    ],
)
def test_means_are_returned_only_where_a_gradient_reads_them(name, correction, means):
    expected = ["conditioning", "latents", "log_probs", *(["means"] if means else [])]
    assert fields(name, f"algorithm.correction={correction}") == expected


def test_the_automatic_correction_masks_by_means_from_where_it_is_decoupled():
    """Mode `auto` adds kappa_nats beyond S = 4."""
    assert "means" not in fields("flow_grpo", "staleness.max_updates=4")
    assert "means" in fields("flow_grpo", "staleness.max_updates=5")


def test_objectives_on_final_latents_need_nothing_of_the_steps():
    assert fields("awm", "rollout.sde=null") == ["conditioning", "final"]
