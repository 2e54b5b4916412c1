"""Shows who waited for whom: each role's state over time, computed from the spans of its workers.

A worker with several concurrent activities counts once: busy takes precedence over backpressured, and backpressured
over starved, as in the summary. The remainder is time without any record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_async.commands.report.blocks import Axis, Block, Cell, Chart, Details, Section, Series, Table, Text
from omni_async.commands.report.lanes import Timeline, lanes
from omni_async.commands.report.shown import Shown, tabs
from omni_async.records.write.activity import Activity, Stretch

Shares = NDArray[np.float64]  # (number of stretches, states)
STATES = ("busy", "backpressured", "starved", "nothing")
_BINS = 160
STAGES = {"rollout": "generation", "reward": "scoring", "trainer": "training"}
_TURNS = 0.6  # largest busy share of a stage in a loop whose stages take turns
_ORDER = ("rollout", "reader", "reward", "trainer", "publisher")


def waiting(shown: Sequence[Shown]) -> Section:
    """Return the section of every run's roles over time."""
    lead = (
        "An engine that has no room, a scorer without samples, a trainer without groups: waits show the slowest part."
    )
    return Section("waiting", "Who waited for whom", lead, tabs=tabs(shown, _one))


def _one(one: Shown) -> list[Block]:
    timeline = Timeline(one.run.spans())
    if not timeline.number:
        return [Text("This run has no timeline: neither trace.json nor spans.jsonl is there.", "nothing")]
    start, end = timeline.start, timeline.end
    roles = shares(one.run.spans(), start, end)
    means = {role: dict(zip(STATES, bins.mean(axis=0), strict=True)) for role, bins in roles.items()}
    return [
        Text(slowest(means, one.run.setting("staleness.max_updates")).why),
        lanes(one.run, timeline),
        Details(
            "Shares of the time, by role",
            [*(_areas(role, bins, end - start) for role, bins in roles.items()), _totals(roles)],
        ),
    ]


def shares(spans: Iterable[Stretch], start: float, end: float, bins: int = _BINS) -> dict[str, Shares]:
    """Return, per role, the share of its workers' time in each state.

    Args:
        spans: of all workers; a worker and its replacement count as one worker.
        start, end: seconds of the spans' clock.
        bins: number of equal stretches, which begin at `start`.

    Returns:
        role -> (bins, 4) in the order of `STATES`, each row adding up to 1."""
    found = Activity(np.linspace(start, end, bins + 1), spans).shares(end)
    ordered = sorted(found, key=lambda role: (_ORDER.index(role) if role in _ORDER else len(_ORDER), role))
    rest = {role: 1.0 - rows.sum(axis=1, keepdims=True) for role, rows in found.items()}
    return {role: np.clip(np.hstack([found[role], rest[role]]), 0.0, 1.0) for role in ordered}


class Slowest(NamedTuple):
    """The slowest stage, or `none`, and a sentence with its evidence and a remedy."""

    stage: str
    why: str


def shares_from(busy: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return role -> state -> share of the time, of roles whose busy share alone is known.

    The rest counts as waiting for groups in the trainer, and for room elsewhere."""
    waits = {role: "starved" if role == "trainer" else "backpressured" for role in busy}
    return {role: {"busy": share, waits[role]: 1 - share} for role, share in busy.items()}


def slowest(shares_: Mapping[str, Mapping[str, float]], budget: Any) -> Slowest:
    """Find the slowest stage.

    Args:
        shares_: role -> state -> share of its workers' time; a missing state is 0.
        budget: `staleness.max_updates` of the run, as its configuration has it."""
    trainer, rollout, reward = (shares_.get(role, {}) for role in ("trainer", "rollout", "reward"))
    if not trainer or not rollout:
        return Slowest("unknown", "Waits are unknown: nothing was recorded of the trainer or of the engines.")
    busy = {STAGES[role]: shares_[role].get("busy", 0.0) for role in STAGES if role in shares_}
    if budget == 0 and max(busy.values()) < _TURNS:
        each = ", ".join(f"{stage} is busy {share:.0%} of the time" for stage, share in busy.items())
        return Slowest("none", f"The stages take turns: {each}. What helps: staleness.max_updates above 0.")
    starves, held_back = trainer.get("starved", 0.0), rollout.get("backpressured", 0.0)
    starved = f"The trainer waited for groups {starves:.0%} of the time"
    held = f"had no room for {held_back:.0%} of their time"
    waits = (states.get("starved", 0.0) + states.get("backpressured", 0.0) for states in (trainer, rollout))
    if max(waits) < 0.1:
        return Slowest("none", f"{starved}, and engines {held}: neither waited much.")
    if starves >= held_back:
        if busy["generation"] >= busy.get("scoring", 0.0):
            more = "more rollout.workers, a larger rollout.max_batch or fewer steps or tokens a sample"
            return Slowest("generation", f"{starved}: generation is the slowest part. What helps: {more}.")
        more = "more reward.workers, a larger reward.batch or a cheaper scorer"
        return Slowest("scoring", f"{starved}: scoring is the slowest part. What helps: {more}.")
    if reward.get("busy", 0.0) > busy["training"]:
        return Slowest("scoring", f"Engines {held}, and scoring is the slowest part. What helps: more reward.workers.")
    return Slowest(
        "training",
        f"Engines {held}, because training is the slowest part and the staleness budget is used up. What helps:"
        " more trainer.workers or a larger trainer.micro_batch_size.",
    )


def _areas(role: str, bins: Shares, wall_s: float) -> Chart:
    middles = [(number + 0.5) * wall_s / len(bins) / 60 for number in range(len(bins))]
    stacked = [
        Series(state, {"minutes": middles}, [round(float(share), 4) for share in column], colour=state)
        for state, column in zip(STATES, bins.T, strict=True)
    ]
    hint = (
        f"Share of its workers' time, in {len(bins)} stretches of {wall_s / len(bins):.3g} s: the colours add up to 1."
    )
    x = {"minutes": Axis("time since the first span", "min")}
    y = Axis("share of time", low=0, high=1)
    return Chart(f"waiting-{role}", role, hint, x, y, stacked, form="area", stacked=True)


def _totals(roles: dict[str, Shares]) -> Table:
    rows: list[list[Cell]] = [[role, *(f"{share:.1%}" for share in bins.mean(axis=0))] for role, bins in roles.items()]
    hint = "Of the whole timeline, which is that of the newest attempt."
    return Table("waiting-totals", "Shares of the time, by role", ["role", *STATES], rows, hint)
