"""Tests liveness at the edge, with real roles: every job ends, and a deadlock fails at once."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from tests.simulation.chaos_job import Job, Temper, make_config
from tests.simulation.chaos_world import World

BUDGETS = (0, 1, 2)


def play(
    S: int,
    faults: tuple[tuple[int, str], ...] = (),
    temper: dict[str, Any] | None = None,
    prompts: int = 3,
    **changes: Any,
) -> World:
    config = make_config(**{"rollout__workers": 2, "trainer__updates": 3, "staleness__max_updates": S, **changes})
    assert config is not None
    return World(Job(S, config, Temper(**temper or {}), faults, prompts)).run()


def ended(world: World) -> Counter[str]:
    return Counter(line.event for line in world.lines)


EDGES: dict[str, dict[str, Any]] = {
    **{
        f"slots for {groups} groups and {samples} samples": {"buffer__groups": groups, "buffer__trajectories": samples}
        for groups, samples in product((1, 2, 64), (1, 64))
    },
    "one prompt: an epoch has no end at which a role could wait": {
        "prompts": 1,
        "trainer__updates": 5,
    },
    **{f"swap: {swap}": {"weights__swap": swap} for swap in ("step", "request", "drain")},
    "in step": {"reward__streaming": False},
    "exact": {"staleness__exact": True},
}


@pytest.mark.parametrize("S", BUDGETS)
@pytest.mark.parametrize("edge", EDGES)
def test_a_calm_job_trains_all_its_groups(S: int, edge: str) -> None:
    assert ended(play(S, **EDGES[edge])) == {"trained": 2 * EDGES[edge].get("trainer__updates", 3)}


@pytest.mark.parametrize("S", BUDGETS)
def test_every_number_of_updates_between_publishes(S: int) -> None:
    """Checks that no gate waits for a version that is never published, and no more is admitted than trained."""
    for every, updates in product(range(1, S + 2), (1, 2, 3, 4)):
        assert ended(play(S, weights__publish_every=every, trainer__updates=updates)) == {"trained": 2 * updates}


@pytest.mark.parametrize("S", BUDGETS)
def test_every_group_is_rejected(S: int) -> None:
    """Ends a run without any signal, with the reason."""
    world = play(S, temper={"equal_rewards": 1.0})
    assert world.seen["attempt ended: fruitless"] == 1
    # Dropped are those that were under way when the run was given up.
    assert set(ended(world)) <= {"rejected", "dropped"} and ended(world)["rejected"] >= 32


@pytest.mark.parametrize("S", BUDGETS)
@pytest.mark.parametrize("how", ["equal_rewards", "lasting_failures"])
def test_most_groups_of_every_batch_are_filtered_away(S: int, how: str) -> None:
    world = play(S, temper={how: 0.6})
    assert ended(world)["trained"] == 6 and sum(ended(world).values()) > 6


@pytest.mark.sliced(floor=3)
@pytest.mark.parametrize("S", BUDGETS)
@pytest.mark.parametrize("what", ["kill", "stop", "every engine crashes"])
def test_at_every_message(S: int, what: str) -> None:
    """Resumes, or replaces all engines, in every phase: after each message that a calm run exchanges."""
    for message in range(1, play(S).messages + 1):
        world = play(S, faults=((message, what),))
        assert ended(world)["trained"] == 6, f"{what} after message {message}"
