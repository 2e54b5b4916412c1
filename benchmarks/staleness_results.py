"""Reads the numbers of one complete run of the staleness experiment from its folder.

Rewards are plotted over the images that were *admitted* up to an update, in admission order, rejected groups included:
what the policy had cost until then. `images` of metrics.jsonl also counts the next S updates' images, which are under
way by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.staleness_plan import Cell
from omni_async.tracking.files import read_lines
from omni_async.tracking.summary import read_summary
from omni_async.types import LedgerEntry

LAST_UPDATES = 20
# Name in results -> name in metrics.jsonl, averaged over the run's updates.
AVERAGED = {
    "staleness": "staleness/mean",
    "log_ratio_variance": "log_ratio_nats/variance",
    "ess": "ess",
    "weight": "weight/mean",
    "masked": "masked",
    "gamma": "gamma",
}


class ValidationAt(msgspec.Struct, frozen=True):
    """A validation round of `version`, which had cost `images` images; `value` is the mean reward."""

    version: int
    images: int
    value: float
    parts: dict[str, float]


class CellResult(msgspec.Struct, frozen=True):
    """The numbers of one cell. `images` and `rewards`: a number per update. `numbers`: final `validation`,
    `reward_last` (mean of the last LAST_UPDATES updates), `reward_area` (area under the reward curve over updates,
    divided by their number) and the AVERAGED ones; None where the run has none."""

    staleness: int
    correction: str
    seed: int
    run: str
    seconds: float
    images: list[int]
    rewards: list[float]
    validation: list[ValidationAt]
    numbers: dict[str, float | None]


def measure(cell: Cell, run: Path, group_size: int) -> CellResult:
    """Measures a run. `run` is a run folder whose summary says done, `group_size` its rollout.group_size."""
    summary = read_summary(run / "summary.json")
    updates = [line for line in _lines(run / "metrics.jsonl") if "reward" in line]
    rewards = [float(line["reward"]) for line in updates]
    images = images_by_update(_ledger(run / "ledger.jsonl"), len(updates), group_size)
    validation = [
        ValidationAt(point.version, images[point.version - 1] if point.version else 0, point.value, point.parts)
        for point in summary.validation
    ]
    numbers = {
        "validation": validation[-1].value if validation else None,
        "reward_last": _mean(rewards[-LAST_UPDATES:]),
        "reward_area": _mean(rewards),
        **{name: _mean(line.get(metric) for line in updates) for name, metric in AVERAGED.items()},
    }
    return CellResult(
        cell.staleness, cell.correction, cell.seed, run.name, summary.wall_s, images, rewards, validation, numbers
    )


def images_by_update(ledger: Iterable[LedgerEntry], updates: int, group_size: int) -> list[int]:
    """Returns, for update 1, 2, ..., the images of all groups admitted up to the last one it trained on, whether or
    not the others were trained."""
    newest = [0] * updates
    for entry in ledger:
        if entry.trained_version is not None:
            newest[entry.trained_version - 1] = max(newest[entry.trained_version - 1], entry.group + 1)
    return [groups * group_size for groups in accumulate(newest, max)]


def _mean(values: Iterable[float | None]) -> float | None:
    """Averages the values that are there: a metric that was not finite is null in its line."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in read_lines(path)]


def _ledger(path: Path) -> list[LedgerEntry]:
    return [msgspec.json.decode(line, type=LedgerEntry) for line in read_lines(path)]
