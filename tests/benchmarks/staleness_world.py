"""Writes a small recipe to disk, run folders as a real run leaves them, and results without a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.staleness_plan import CORRECTIONS, Cell, Plan
from benchmarks.staleness_results import CellResult, ValidationAt
from omni_async.aio.clock import WallClock
from omni_async.config import Config
from omni_async.tracking.rundir import RunDirectory, append_jsonl
from omni_async.tracking.summary import Counters, Status, ValidationPoint, summarise, write_summary
from omni_async.types import LedgerEntry
from tests.runtime.runtime_world import write_world


def plan_in(folder: Path, **changes: Any) -> Plan:
    """Plans over a recipe with 2 groups of 2 samples per update, and validation."""
    if not (folder / "recipe.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_world(folder, validation={"prompts": "prompts.txt"}, rollout={"num_inference_steps": 6})
    default = {"updates": 3, "seeds": 1, "staleness": (0, 1), "corrections": CORRECTIONS, "kappa_nats": 2.0}
    return Plan(recipe=folder / "recipe.yaml", out=folder / "out", **{**default, **changes})


def record(
    config: Config, rewards: Sequence[float], *, status: Status = "done", metrics: Sequence[dict[str, Any]] = ()
) -> RunDirectory:
    """Writes a run folder in config.run.dir: two trained groups per update, and one rejected before the second
    update's."""
    run = RunDirectory.create(config, WallClock())
    groups = [(0, 1), (1, 1), (2, None), *((3 + n, 2 + n // 2) for n in range(2 * len(rewards) - 2))]
    for group, version in groups:
        append_jsonl(run.ledger, entry(group, version))
    for n, reward in enumerate(rewards):
        run.append_metrics(n + 1, {"reward": reward, **(metrics[n] if metrics else {})})
        run.append_metrics(n + 1, {"validation/reward": 0.5})
    validation = [
        ValidationPoint(version=0, value=0.25),
        ValidationPoint(version=len(rewards), value=0.75, parts={"exact": 0.5}),
    ]
    summary = summarise(
        run=run.run_id,
        status=status,
        started=0.0,
        finished=8.0,
        images=0,
        rewards=rewards,
        staleness=[],
        counters=Counters(admitted=0, trained=0, rejected=0, dropped=0, live=0),
        spans=[],
        devices=1.0,
        validation=validation if rewards else (),
    )
    write_summary(run.summary, summary)
    return run


def entry(group: int, trained_version: int | None) -> LedgerEntry:
    return LedgerEntry(
        run="run",
        group=group,
        prompt=0,
        event="rejected" if trained_version is None else "trained",
        reason=None,
        admitted_version=0,
        trained_version=trained_version,
        staleness=None,
        step_versions=None,
        attempts=1,
        reward=None,
    )


def result(
    cell: Cell, rewards: Sequence[float] = (0.0, 1.0), images: Sequence[int] = (4, 8), **numbers: float | None
) -> CellResult:
    validation = [ValidationAt(0, 0, 0.25, {}), ValidationAt(len(rewards), images[-1], 0.5, {})]
    blank: dict[str, float | None] = dict.fromkeys(
        (
            "validation",
            "reward_last",
            "reward_area",
            "staleness",
            "log_ratio_variance",
            "ess",
            "weight",
            "masked",
            "gamma",
        )
    )
    return CellResult(
        cell.staleness,
        cell.correction,
        cell.seed,
        "run",
        1.0,
        list(images),
        list(rewards),
        validation,
        {**blank, **numbers},
    )
