"""Tests `staleness.exact`: nothing is trained while anything could still be generated, so every age is the budget."""

from __future__ import annotations

import pytest
from control_world import distinct, make_config, play

from omni_async.types import ScoreJob


@pytest.mark.parametrize("S", [0, 1, 3])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("window", [1, 4])
def test_after_the_first_s_updates_every_group_is_exactly_s_old(S: int, P: int, window: int) -> None:
    """Ages climb 0, 1, ..., S, because all that the first S + 1 updates train is admitted under version 0."""
    config = make_config(S=S, P=P, updates=S + 5, window=window, engines=2, exact=True)
    for seed in range(3):
        run = play(config, seed=seed, pause={"generate": 9, "publish": 9})
        assert run.outcome == ("done", None)
        assert run.staleness == [min(version, S) for version in range(S + 5) for _ in range(P)]


def test_without_it_the_same_run_is_of_mixed_ages() -> None:
    run = play(make_config(S=3, P=2, updates=8, engines=2), pause={"generate": 9, "publish": 9})
    assert run.staleness != [min(version, 3) for version in range(8) for _ in range(2)]


def test_a_resumed_run_climbs_to_the_budget_again() -> None:
    run = play(make_config(S=2, P=1, updates=9, exact=True), start_version=4, start_group=12)
    assert run.staleness == [0, 1, 2, 2, 2]


def test_rejected_groups_are_replaced_before_anything_is_trained() -> None:
    """Checks that a replacement is as old as what it replaces, whatever is rejected when."""

    def reward(job: ScoreJob) -> float:
        return 0.5 if int(job.sample_id[1:].split(".")[0]) % 3 == 1 else distinct(job)

    run = play(make_config(S=2, P=2, updates=7, engines=2, exact=True), reward=reward, seed=4)
    assert run.outcome == ("done", None)
    assert any(entry.event == "rejected" for entry in run.entries)
    assert run.staleness == [min(version, 2) for version in range(7) for _ in range(2)]
