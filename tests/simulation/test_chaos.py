"""Plays ten thousand jobs of real roles, each with its own faults, delays and order of things."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from tests.simulation.chaos import ScheduleFailed, count, play
from tests.simulation.chaos_job import FAULTS, Job, Temper, draw, make_config
from tests.simulation.chaos_world import World

SCHEDULES, SLICE, CHUNK = 10_000, 250, 500
happened = cache(count)


def test_a_slice_of_the_schedules(slice_of: Callable[[str, int, int], range]) -> None:
    """Plays a slice that has faults of every kind."""
    seeds = slice_of("chaos schedules", SCHEDULES, SLICE)[:SLICE]
    seen = happened(seeds)
    assert seen["schedules"] == SLICE
    assert gc.get_freeze_count() == 0
    assert not [what for what in FAULTS if not seen[what]]
    assert seen["messages"] > 50 * SLICE


@pytest.mark.thorough
@pytest.mark.parametrize(
    "chunk", [range(first, first + CHUNK) for first in range(0, SCHEDULES, CHUNK)], ids=lambda seeds: f"{seeds.start}-"
)
def test_schedules(chunk: range) -> None:
    assert happened(chunk)["schedules"] == CHUNK


@pytest.mark.thorough
def test_everything_that_may_happen_has_happened() -> None:
    """Checks that everything happened in as many of the schedules as to be no accident."""
    seen = sum((happened(range(first, first + CHUNK)) for first in range(0, SCHEDULES, CHUNK)), Counter[str]())
    assert seen["schedules"] == SCHEDULES
    sys.stdout.write("\n".join(f"{times:8d}  {what}" for what, times in sorted(seen.items())) + "\n")
    rare = {what: seen[what] for what in EXPECTED if seen[what] < 3}
    assert not rare, rare


ENGINE = ("idle", "generating", "joining", "staging", "swapping")
TRAINER = (
    *["accumulating", "stepping", "exporting", "saving", "writing", "closing", "between"],
    "before the first version",
)
EXPECTED = [
    *FAULTS,
    *(f"engine {how} / {phase}" for how in ("crash", "hang") for phase in ENGINE),
    *(f"{fault} / trainer {phase}" for fault in ("engine crash", "scorer crash", "kill") for phase in TRAINER),
    *("engine replaced", "scorer replaced", "engine lost while it joined", "object lost", "stores die"),
    *("hang found by a timeout", "loss found by the publisher", "group given back"),
    *("generation failed", "score failed", "a message of the dead", "a message twice", "shuffled"),
    *("checkpoint with ready groups", "attempt ended: killed", "attempt ended: interrupted"),
    *(f"group {how}" for how in ("trained", "rejected", "dropped")),
    *(f"swap: {how}" for how in ("step", "request", "drain")),
    *(f"S = {budget}" for budget in range(4)),
    *("scored in step", "exact", "validated", "several steps", "one slot for samples", "one slot for groups"),
]


def test_a_hundred_engines_lose_nothing_but_time() -> None:
    config = make_config(
        rollout__workers=100,
        rollout__group_size=8,
        rollout__max_inflight=1,
        rollout__max_batch=1,
        rollout__retries=5,
        rollout__timeout_s=2000.0,
        reward__workers=20,
        reward__batch=4,
        staleness__max_updates=2,
        buffer__trajectories=248,
        buffer__groups=24,
        buffer__window=8,
        trainer__updates=12,
        trainer__groups_per_update=8,
        weights__timeout_s=6000.0,
    )
    assert config is not None
    kinds = [kind for kind, often in (("engine crash", 20), ("scorer crash", 8), ("kill", 2)) for _ in range(often)]
    random.Random(0).shuffle(kinds)
    faults = tuple((80 * number, kind) for number, kind in enumerate(kinds, 1))
    world = World(Job(0, config, Temper(step_s=30.0, duplicated=0.01, store_dies=True), faults)).run()
    assert Counter(line.event for line in world.lines) == {"trained": 96}
    assert world.seen["engine replaced"] > 10 and world.seen["attempt ended: killed"] == 2
    assert world.now < 3600, "progress: at worst a restart, and what was under way"


def test_a_seed_is_always_the_same_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """Plays a seed twice: otherwise a failure could not be looked at."""

    def trace(seed: int) -> str:
        play(seed, trace=True)
        return capsys.readouterr().out

    for seed in range(20):
        assert trace(seed) == trace(seed) != ""


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a lease that is never returned fail: the roles wait, no timer is pending, nothing can happen any more."""
    monkeypatch.setattr("omni_async.control.sample_table.SampleTable.leases_of", lambda self, engine: [])
    seed = next(seed for seed in range(100) if any(kind == "every engine crashes" for _, kind in draw(seed).faults))
    with pytest.raises(
        ScheduleFailed, match=rf"seed {seed}(?s:.*)python -m tests.simulation.chaos --seed {seed} --trace"
    ):
        play(seed)
