"""Shows the staleness of the data that updates trained on, as a distribution over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from omni_async.commands.report.blocks import Axis, Block, Chart, Section, Series, Text
from omni_async.commands.report.shown import UPDATES, Shown, tabs
from omni_async.types import finite

_MOST_BARS = 160
_MOST_AGES = 64


def staleness(shown: Sequence[Shown]) -> Section:
    """Return the section of every run's staleness."""
    lead = (
        "Staleness of a group: how many updates were made between the oldest weights that drew any of its trained steps"
        " and the update that trained it. 0 is on-policy."
    )
    return Section("staleness", "Staleness", lead, tabs=tabs(shown, _one))


def ages_of(one: Shown) -> list[tuple[int, int]]:
    """Return the version and the staleness of every trained group."""
    return [
        (line.trained_version, line.staleness)
        for line in one.run.ledger
        if line.trained_version is not None and line.staleness is not None
    ]


def _one(one: Shown) -> list[Block]:
    trained = ages_of(one)
    if not trained:
        return [Text("No group was trained.", tone="nothing")]
    counts = Counter(age for _, age in trained)
    ages = sorted(counts)
    oldest = ages[:_MOST_AGES][-1]
    updates = sorted({version for version, _ in trained})
    width = -(-len(updates) // _MOST_BARS)
    bars = [updates[i : i + width] for i in range(0, len(updates), width)]
    bar_of = {update: number // width for number, update in enumerate(updates)}
    totals = [Counter[int]() for _ in bars]
    for version, age in trained:
        totals[bar_of[version]][min(age, oldest)] += 1
    areas = [
        Series(
            f"staleness {age}{' and more' if age == oldest < ages[-1] else ''}",
            {"update": [float(bar[-1]) for bar in bars]},
            [total[age] / total.total() for total in totals],
            colour=f"age-{number / max(1, min(len(ages), _MOST_AGES) - 1):.3f}",
        )
        for number, age in enumerate(ages[:_MOST_AGES])
    ]
    mean = sum(age * count for age, count in counts.items()) / len(trained)
    budget = one.run.setting("staleness.max_updates")
    said = f"{mean:.2f} updates on average, {max(ages)} at most; the budget S is {budget}."
    note = f"Each bar is {width} updates, their groups counted together." if width > 1 else ""
    hint = "Share of an update's groups by their staleness, from the ledger; shades go from the freshest to the oldest."
    y = Axis("share of groups", low=0, high=1)
    chart = Chart(
        "staleness",
        "Staleness of the trained groups",
        hint,
        {"update": UPDATES},
        y,
        areas,
        form="bar",
        stacked=True,
        wide=True,
        note=note,
    )
    return [Text(" ".join(filter(None, (said, _reserve(one))))), chart]


def _reserve(one: Shown) -> str:
    """Return the reserve of groups admitted just in time, and its price; empty if the run recorded neither."""
    reserves, starved = (
        [seconds for line in one.run.updates if (seconds := finite(line.get(f"admission/{name}"))) is not None]
        for name in ("reserve_s", "starved_s")
    )
    if not any(reserves) and not any(starved):
        return ""
    return (
        f"Groups were admitted just in time with a reserve of {median(reserves):.3g} s (median); at most"
        f" {sum(starved):.3g} s of the trainer's waits in all are its price."
    )
