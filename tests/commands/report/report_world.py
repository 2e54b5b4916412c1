"""Writes run folders with known numbers, and finds the parts of their page's data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_async.commands.report.data import page_of
from omni_async.records.read.record import read_run
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.types import LedgerEntry


def page(*folders: Path, names: tuple[str, ...] = ()) -> dict[str, Any]:
    return page_of([read_run(folder) for folder in folders], "now", names)


def section(name: str, *folders: Path) -> dict[str, Any]:
    (found,) = page(*folders, names=(name,))["sections"]
    return found


def blocks(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all blocks of a section, its runs' and folded ones included."""
    shown = [*found["blocks"], *(each for tab in found["tabs"] for each in tab["blocks"])]
    return [*shown, *(each for one in shown if one["kind"] == "details" for each in one["blocks"])]


def block(found: dict[str, Any], id_: str) -> dict[str, Any]:
    return next(each for each in blocks(found) if each.get("id") == id_)


def texts(found: dict[str, Any]) -> str:
    return "\n".join([found["title"], *(each["text"] for each in blocks(found) if each["kind"] == "text")])


def facts(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return label -> value and detail of all facts of a section."""
    items = [item for each in blocks(found) if each["kind"] == "facts" for item in each["items"]]
    return {item["label"]: (item["value"], item["detail"]) for item in items}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def entry(group: int, version: int, reward: float, staleness: int = 0) -> LedgerEntry:
    return LedgerEntry("made", group, 0, "trained", None, 0, version, staleness, (0, 0), 1, reward)


def validation_round(version: int, rewards: list[float], drawn: str = "the same") -> dict[str, Any]:
    """Return the line of a complete round with the rewards of its samples."""
    counts = {"samples": len(rewards), "asked": len(rewards), "drawn": drawn, "scores": {"reward": rewards}}
    return {"update": version, "validation/reward": sum(rewards) / len(rewards), **counts}


def written(
    folder: Path,
    rewards: list[float],
    seed: int = 0,
    validation: Mapping[int, float | list[float]] | None = None,
    *,
    name: str = "made",
    budget: int | None = None,
    update_s: float = 60.0,
    **numbers: float,
) -> Path:
    """Write the folder of a killed run with these rewards of its updates, two groups each, and numbers of each.

    `validation`: version -> the round's mean, or the rewards of its samples."""
    folder.mkdir(parents=True)
    staleness = "" if budget is None else f"staleness: {{max_updates: {budget}}}\n"
    (folder / "config.yaml").write_text(f"run: {{name: {name}, seed: {seed}}}\ntrainer: {{updates: 40}}\n{staleness}")
    run = RunDirectory(folder)
    for version, reward in enumerate(rewards, start=1):
        line = {
            "update": version,
            "reward": reward,
            "images": 8 * version,
            "wall_s": update_s * version,
            "finished": 1e9,
        }
        append_jsonl(run.metrics, line | numbers)
        for half in (0, 1):
            append_jsonl(run.ledger, entry(2 * version + half, version, reward + 0.01 * half, staleness=half))
    for version, reward in (validation or {}).items():
        if isinstance(reward, list):
            append_jsonl(run.metrics, validation_round(version, reward))
        else:
            append_jsonl(run.metrics, {"update": version, "validation/reward": reward})
    return folder
