"""Tests that runs of an earlier version still report, evaluate and export, and that runs resume from them."""

from __future__ import annotations

import csv
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from omni_async.cli import main
from omni_async.config import load
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import read_run
from omni_async.records.read.run_list import list_runs
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import read_summary
from omni_async.simulation import what_if
from tests.support.job_world import Run
from tests.support.recorded_runs import place

FULL, LORA = "full-20261125-210306", "lora-20261125-210320"
LORA_KEYS = (
    "run.name=lora",
    "model.lora={rank: 2, alpha: 64}",
    "trainer.optimizer={name: adamw, lr: 1.0e-3}",
    "trainer.ema={every: 1}",
    "weights.payload=lora",
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides a folder of the test's own with the runs, and works next to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(what_if, "_SEEDS", 1)  # as pages have several simulations
    return place(tmp_path)


def finished(runs: Path, name: str, *overrides: str) -> Run:
    config = load("recipe.yaml", overrides)
    return Run(config, runs / name, read_summary(runs / name / "summary.json"))


@pytest.mark.parametrize(("name", "status", "updates", "rounds"), [(FULL, "done", 4, 3), (LORA, "interrupted", 3, 1)])
def test_report_and_status(
    runs: Path, name: str, status: str, updates: int, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(runs / name)
    assert (run.status, len(run.updates), len(run.rounds), run.left_out) == (status, updates, rounds, {})
    assert run.updates[2]["reward"] == pytest.approx(-0.866625, abs=1e-12)
    assert run.updates[2]["staleness/max"] == 2.0
    assert len(run.ledger) == 2 * updates + (4 if name == LORA else 0)
    assert run.summary is not None and [*run.spans()] and run.grids and run.checkpoints
    assert main(["report", str(runs / name), "--out", "report.html"]) == 0
    page = Path("report.html").read_text()
    assert name in page and "jpeg_kb" in page
    capsys.readouterr()
    assert main(["status", str(runs / name)]) == 0
    shown = capsys.readouterr().out
    assert name in shown and status in shown


def test_updates_that_a_running_attempt_makes_again_do_not_count(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Holds the folder as an attempt does that resumes from update 2 of 3, until its first update."""

    def seen() -> tuple[int, ...]:
        deque(follower.poll(), maxlen=0)
        run, [listed] = read_run(path), [one for one in list_runs(runs) if one.run == LORA]
        assert main(["report", str(path), "--out", "report.html"]) == 0
        return len(run.updates), len(follower.updates), listed.update, len(run.ledger), len(follower.ended)

    path = runs / LORA
    follower = Follower(path)
    assert seen() == (3, 3, 3, 10, 10)
    held = RunDirectory.reopen(path)
    held.state_resumption(2, 0, 4)
    assert seen() == (2, 2, 2, 4, 4) and follower.summary is None
    capsys.readouterr()
    assert main(["status", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "it resumes from update 2, and makes later updates again" in shown and "the last update was 2" in shown
    held.release()
    assert seen() == (3, 3, 3, 10, 10) and follower.summary is not None


def transformer(folder: str) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = DiffusionPipeline.from_pretrained(folder).transformer.state_dict()
    return weights


def test_adapters_are_exported_with_their_own_alpha(runs: Path) -> None:
    assert main(["export", str(runs / LORA), "--merged", "--out", "exported"]) == 0
    exported, base, recorded = transformer("exported"), transformer("model"), finished(runs, LORA).weights(3)
    downs = {name: value for name, value in recorded.items() if ".lora_A." in name}
    assert len(downs) == 4 and len(recorded) == 8
    for name, down in downs.items():
        layer = name.removeprefix("transformer.").partition(".lora_A.")[0] + ".weight"
        moved = recorded[name.replace(".lora_A.", ".lora_B.")] @ down * (64 / 2)
        assert moved.abs().max() > 1e-4
        torch.testing.assert_close(exported[layer], base[layer] + moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [FULL, LORA])
def test_eval_and_export(runs: Path, name: str) -> None:
    assert main(["eval", str(runs / name), "--which", "base,2", "--out", "compared"]) == 0
    found: dict[str, Any] = json.loads(Path("compared/results.json").read_text())
    assert [one["model"] for one in found["models"]] == ["base", "update-000002"]
    rows = [*csv.DictReader(Path("compared/scores.csv").read_text().splitlines())]
    assert len(rows) == 8 and all(-1.0 < float(row["reward"]) < -0.7 for row in rows)
    if name == LORA:
        return
    for version in (2, 4):
        assert main(["export", str(runs / FULL), "--which", str(version), "--out", f"exported-{version}"]) == 0
        exported, base = transformer(f"exported-{version}"), transformer("model")
        recorded = finished(runs, FULL).weights(version)
        assert all(torch.equal(exported[name.removeprefix("transformer.")], value) for name, value in recorded.items())
        assert len(recorded) == len(base) and any(not torch.equal(exported[name], base[name]) for name in base)


def test_an_interrupted_run_resumes_in_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (*LORA_KEYS, "trainer.updates=5")
    assert main(["train", "recipe.yaml", *keys, "checkpoint.resume=auto"]) == 0
    shown = capsys.readouterr().out
    assert "groups that waited for the trainer (2) are made again: log-prob dtype, noise changed" in shown
    run = finished(runs, LORA, *keys).check_every_group_ended_once()
    assert (run.summary.status, run.summary.updates) == ("done", 5)
    assert [line["update"] for line in run.metrics] == [1, 2, 3, 4, 5]


def test_a_checkpoint_starts_a_new_run(runs: Path) -> None:
    checkpoint = runs / FULL / "checkpoints" / "update-000002"
    assert main(["train", "recipe.yaml", "run.name=again", f"checkpoint.resume={checkpoint}"]) == 0
    (name,) = (path.name for path in runs.iterdir() if path.name.startswith("again-"))
    run = finished(runs, name)
    assert (run.summary.status, run.summary.counters.trained) == ("done", 4)
    assert [line["update"] for line in run.metrics] == [3, 4]
