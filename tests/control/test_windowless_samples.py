"""Tests training samples without a window: their final latents are trained on, so every step of theirs counts, or none
if no policy made them."""

from __future__ import annotations

import asyncio

import pytest
from control_world import Bench, hold, make_config, make_coordinator, make_result, now, play

from omni_async.control.coordinator import Coordinator
from omni_async.control.requests import RequestFactory
from omni_async.control.versions import WeightMismatch
from omni_async.types import LedgerEntry, Prompt, SampleRequest

STEPS = 3


def leased(kind: str = "train") -> tuple[Coordinator, SampleRequest]:
    """Makes a coordinator at version 2, and one request that it leased."""
    c, _ = make_coordinator(make_config(steps=STEPS, validation={"every": 1, "share": 0.5}), start_version=2)
    asyncio.run(hold(c, 2))
    requests = [request for _ in range(4) for request in now(c.next_samples("rollout-0", 1, 4))]
    return c, next(request for request in requests if request.kind == kind)


def test_no_group_has_a_window_and_no_request_noise() -> None:
    _, request = leased()
    assert (request.window, request.noise_level, request.num_inference_steps) == (None, 0.0, STEPS)
    factory = RequestFactory(make_config(steps=STEPS))
    assert [factory.window(group) for group in range(5)] == [None] * 5
    assert len({request.seed for request in factory.training(0, Prompt(0, "a cat"), None)}) == 2


@pytest.mark.parametrize(
    ("kind", "versions", "problem"),
    [
        ("train", (1, 2, 2), None),
        ("train", (), None),
        ("train", (2,), "of rollout-0: 1 step versions for 3 trained steps"),
        ("train", (2, 2), "of rollout-0: 2 step versions for 3 trained steps"),
        ("train", (2, 2, 2, 2), "of rollout-0: 4 step versions for 3 trained steps"),
        ("train", (2, 2, 3), "newest is 2"),
        ("validation", (), None),
        ("validation", (2, 2, 2), "3 step versions for 0 trained steps"),
    ],
)
def test_a_training_sample_carries_the_versions_of_all_its_steps_or_none_and_a_validation_sample_carries_none(
    kind: str, versions: tuple[int, ...], problem: str | None
) -> None:
    c, request = leased(kind)
    done = c.samples_done("rollout-0", [make_result(request, "rollout-0", versions, version=2)])
    if problem is None:
        now(done)
        assert [job.sample_id for job in now(c.next_to_score("reward-0", 9))] == [request.sample_id]
    else:
        with pytest.raises((ValueError, WeightMismatch), match=problem):
            now(done)


@pytest.mark.parametrize("S", [0, 2])
def test_a_run_on_final_latents_keeps_the_budget(S: int) -> None:
    run = play(make_config(S=S, P=2, updates=6, engines=2, steps=STEPS), seed=S)
    assert run.outcome == ("done", None)
    assert all(group.window is None for _, group in run.taken)
    assert {len(sample.step_versions) for _, group in run.taken for sample in group.samples} == {STEPS}
    assert max(run.staleness) <= S
    assert [entry.staleness for entry in run.entries] == run.staleness


def trained(bench: Bench, updates: int) -> list[LedgerEntry]:
    """Returns the ledger after each update trained one group, all groups having been made as soon as they were
    admitted."""

    async def main() -> None:
        made = 0
        for version in range(updates):
            for group in range(made, now(bench.c.continuation()).next_group):
                await bench.generate(group, version)
            made = now(bench.c.continuation()).next_group
            taken = bench.take()
            assert taken is not None
            await bench.update(taken)

    asyncio.run(main())
    return bench.entries


def test_a_group_of_a_dataset_is_as_old_as_its_admission() -> None:
    made = trained(Bench(S=2, P=1, updates=9, steps=STEPS), 5)
    stored = trained(Bench(S=2, P=1, updates=9, steps=STEPS, stored=True), 5)
    expected = [((0, 0), 0), ((0, 0), 1), ((0, 0), 2), ((1, 1), 2), ((2, 2), 2)]
    assert [(e.step_versions, e.staleness) for e in made] == expected
    assert [e.step_versions for e in stored] == [None] * 5
    ages = [[(e.group, e.admitted_version, e.trained_version, e.staleness) for e in each] for each in (made, stored)]
    assert ages[0] == ages[1]


def test_a_group_of_a_dataset_that_is_not_trained_has_no_age() -> None:
    bench = Bench(S=1, P=1, updates=4, steps=STEPS, stored=True)
    asyncio.run(bench.generate(0, 0))
    now(bench.c.stop("ctrl-c"))
    assert [(e.event, e.staleness, e.step_versions) for e in bench.entries] == [("dropped", None, None)] * 2


def test_what_is_told_of_an_update_agrees_with_the_ledger() -> None:
    bench = Bench(S=2, P=1, updates=9, steps=STEPS, stored=True)
    entries = trained(bench, 4)
    reported = [event.data["staleness"] for event in now(bench.c.events()) if event.kind == "update"]
    assert reported == [[entry.staleness] for entry in entries] == [[0], [1], [2], [2]]
