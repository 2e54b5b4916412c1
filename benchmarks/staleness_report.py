"""Reports the staleness experiment: `report.md`, `results.json` and, from `staleness_plot`, `reward.png`, of the
cells that are complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.finished_runs import finished_run
from benchmarks.staleness_plan import Plan
from benchmarks.staleness_results import LAST_UPDATES, CellResult, measure
from omni_async.tracking.files import write_atomic

# Name in results -> heading.
_COLUMNS = {
    "validation": "validation",
    "reward_last": f"reward, last {LAST_UPDATES}",
    "reward_area": "area",
    "staleness": "staleness",
    "log_ratio_variance": "Var(L)",
    "ess": "ESS",
    "weight": "weight",
    "masked": "masked",
    "gamma": "gamma",
}
_LEGEND = f"""\
All numbers are means over seeds.

- validation: final mean reward on the validation prompts (in brackets: each seed)
- reward, last {LAST_UPDATES}: mean training reward of the last {LAST_UPDATES} updates
- area: area under the training reward curve over updates, divided by their number
- staleness (updates), Var(L), ESS: averages over the run. L is the log-ratio of the proximal to the behaviour policy
  of one denoising step, in nats, and ESS the effective sample size of exact weights exp(L), as a fraction
- weight, masked, gamma: averages over the run of the correction's weights, of the fraction of rows without weight,
  and of the tempering exponent; – where there is none
"""


class Row(msgspec.Struct, frozen=True):
    """One S with one correction: every number of CellResult.numbers as its mean over seeds, and of each seed."""

    staleness: int
    correction: str
    seeds: list[int]
    mean: dict[str, float | None]
    each: dict[str, list[float | None]]


def collect(plan: Plan) -> list[CellResult]:
    """Measures the plan's complete cells, in its order."""
    found = []
    for cell in plan.cells():
        config = plan.config(cell)
        run = finished_run(plan.folder(cell), config)
        if run is not None:
            found.append(measure(cell, run, config.rollout.group_size))
    return found


def aggregate(results: Sequence[CellResult]) -> list[Row]:
    """Averages over seeds; rows are in the order of first appearance."""
    groups: dict[tuple[int, str], list[CellResult]] = {}
    for result in results:
        groups.setdefault((result.staleness, result.correction), []).append(result)
    rows = []
    for (staleness, correction), group in groups.items():
        each = {name: [result.numbers[name] for result in group] for name in group[0].numbers}
        rows.append(
            Row(
                staleness,
                correction,
                [r.seed for r in group],
                {name: _mean(values) for name, values in each.items()},
                each,
            )
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Formats a table with a line per row."""
    lines = [
        "| " + " | ".join(["S", "correction", "seeds", *_COLUMNS.values()]) + " |",
        "|" + "---|" * (3 + len(_COLUMNS)),
    ]
    for row in rows:
        numbers = [_shown(row.mean[name]) for name in _COLUMNS]
        if len(row.seeds) > 1:
            numbers[0] += f" ({', '.join(map(_shown, row.each['validation']))})"
        lines.append("| " + " | ".join([str(row.staleness), row.correction, str(len(row.seeds)), *numbers]) + " |")
    return "\n".join(lines) + "\n"


def write_report(plan: Plan, results: Sequence[CellResult]) -> str:
    """Writes `report.md` and `results.json` into plan.out and returns the report's text."""
    rows, have = aggregate(results), {(r.staleness, r.correction, r.seed) for r in results}
    missing = [cell.name for cell in plan.cells() if (cell.staleness, cell.correction, cell.seed) not in have]
    parts = ["# Staleness", _setting(plan), markdown(rows), _LEGEND]
    if missing:
        parts.append(f"{len(missing)} of {len(plan.cells())} cells are not complete: {', '.join(missing)}\n")
    text = "\n".join(parts)
    write_atomic(plan.out / "report.md", text.encode())
    record: dict[str, Any] = {
        "recipe": _shown_path(plan.recipe),
        "updates": plan.updates,
        "kappa_nats": plan.kappa_nats,
        "overrides": plan.extra,
        "rows": rows,
        "cells": results,
        "missing": missing,
    }
    write_atomic(plan.out / "results.json", msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return text


def write_plot(plan: Plan, results: Sequence[CellResult]) -> Path:
    """Writes `reward.png` into plan.out. Raises ImportError without matplotlib."""
    from benchmarks.staleness_plot import draw

    path = plan.out / "reward.png"
    draw(results, path)
    return path


def _setting(plan: Plan) -> str:
    extra = f" with `{' '.join(plan.extra)}`" if plan.extra else ""
    return f"`{_shown_path(plan.recipe)}`{extra}, {plan.updates} updates, kappa_nats {plan.kappa_nats:g}.\n"


def _shown_path(path: Path) -> str:
    """Returns the path as one would type it here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _mean(values: Sequence[float | None]) -> float | None:
    """Averages over seeds; None where any seed has none: a mean over other seeds than the next column's would not
    compare."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"
