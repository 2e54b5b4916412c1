"""Tests what a recipe's objective means for the rest of it, which combinations cannot work, what
engines return of a sample, and the share of a group on the rank that all others wait for."""

import pytest
from wrong_combinations import DPO, OFFLINE, RIGHT, WRONG

from omni_async.algorithms.kinds import samples_per_rank, trajectory_fields
from omni_async.algorithms.registry import find_objective, objective_names
from omni_async.algorithms.validation import problems
from tests.config.recipe import MINIMAL, load_text


@pytest.mark.parametrize(("overrides", "said"), WRONG)
def test_a_combination_that_cannot_work_is_one_line_that_names_the_key(overrides, said):
    [problem] = problems(load_text(MINIMAL, *overrides))
    assert all(part in problem for part in said.split(" ... "))
    assert "\n" not in problem
    key, _, reason = problem.partition(": ")
    assert key.split(".")[0] in ("algorithm", "data", "reward", "rollout", "trainer", "validation")
    assert reason


@pytest.mark.parametrize("overrides", RIGHT)
def test_what_can_work_is_not_objected_to(overrides):
    assert list(problems(load_text(MINIMAL, *overrides))) == []


def test_every_objective_is_among_what_can_work():
    assert {load_text(MINIMAL, *overrides).algorithm.name for overrides in RIGHT} == {*objective_names()}


def test_everything_that_is_wrong_is_found():
    config = load_text(
        MINIMAL, *DPO, "rollout.group_size=1", "algorithm.kl_coef=0.1", "algorithm.clip_range=1e-4", "trainer.shard=2"
    )
    assert [problem.split(": ")[0] for problem in problems(config)] == [
        "algorithm.clip_range",
        "trainer.shard",
        "rollout.group_size",
        "algorithm.kl_coef",
    ]


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("rollout.group_size=8",), 8),
        (("rollout.group_size=8", "trainer.workers=2"), 4),
        (("rollout.group_size=8", "trainer.workers=3"), 3),
        (("rollout.group_size=8", "trainer.workers=9"), 1),
        (("rollout.group_size=8", "trainer.workers=6", "trainer.sequence_parallel=2"), 1.5),
        # Draws of a pair are dealt, not its samples.
        ((*DPO, "rollout.group_size=8", "algorithm.forward.draws=6", "trainer.workers=3"), 8 / 3),
        ((*DPO, "rollout.group_size=8", "algorithm.forward.draws=6", "trainer.workers=4"), 8 * 2 / 6),
        ((*OFFLINE, "algorithm.forward.draws=6", "trainer.workers=12"), 2 / 6),
        ((*OFFLINE, "algorithm.forward.draws=6", "trainer.workers=6", "trainer.sequence_parallel=2"), 2 / 6),
    ],
)
def test_a_group_takes_as_long_as_its_busiest_rank(overrides, share):
    config = load_text(MINIMAL, *overrides)
    assert samples_per_rank(config) == pytest.approx(share, rel=1e-12)


def test_a_group_of_another_size_and_degrees_that_do_not_divide():
    config = load_text(MINIMAL, "trainer.workers=3")
    assert samples_per_rank(config, 10) == 4
    with pytest.raises(ValueError, match=r"trainer\.shard: 2 ranks share"):
        samples_per_rank(load_text(MINIMAL, "trainer.workers=3", "trainer.shard=2"))


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
