"""Shows how old the data were that updates trained on, as a distribution over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from omni_async.report.blocks import Axis, Block, Chart, Section, Series, Text
from omni_async.report.shown import UPDATES, Shown, tabs

_MOST_BARS = 160


def staleness(shown: Sequence[Shown]) -> Section:
    """Return the section of every run's staleness."""
    lead = (
        "Staleness of a group: how many updates were made between the oldest weights that drew any of its trained steps"
        " and the update that trained it. 0 is on-policy."
    )
    return Section("staleness", "Staleness", lead, tabs=tabs(shown, _one))


def _one(one: Shown) -> list[Block]:
    per_update: dict[int, Counter[int]] = defaultdict(Counter)
    for line in one.run.ledger:
        if line.trained_version is not None and line.staleness is not None:
            per_update[line.trained_version][line.staleness] += 1
    if not per_update:
        return [Text("No group was trained yet.", tone="nothing")]
    ages = sorted({age for counts in per_update.values() for age in counts})
    updates = sorted(per_update)
    width = -(-len(updates) // _MOST_BARS)
    bars = [updates[i : i + width] for i in range(0, len(updates), width)]
    totals = [sum((per_update[update] for update in bar), Counter[int]()) for bar in bars]
    areas = [
        Series(
            f"staleness {age}",
            {"update": [float(bar[-1]) for bar in bars]},
            [counts[age] / counts.total() for counts in totals],
            colour=f"age-{number / max(1, len(ages) - 1):.3f}",
        )
        for number, age in enumerate(ages)
    ]
    all_counts = sum(totals, Counter[int]())
    mean = sum(age * count for age, count in all_counts.items()) / all_counts.total()
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
    return [Text(said), chart]
