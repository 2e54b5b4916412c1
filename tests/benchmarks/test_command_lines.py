"""Tests benchmark commands: wrong usage starts nothing, and each command measures a miniature."""

from __future__ import annotations

import asyncio
import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coordinator_on_ray, encoder_cache, just_in_time, lora_rollout, precision
from benchmarks.control_plane import Roles, Shape, make_config, measure
from benchmarks.lanes import Lanes
from benchmarks.precision import Cell, Row, read_rows, table
from omni_async.aio.waiting import cancel
from omni_async.config import load
from omni_async.control.admission import withholds
from omni_async.control.coordinator import Coordinator
from omni_async.store import LocalStore
from omni_async.types import LedgerEntry, Prompt


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("control_plane --shapes 0x1x2", "got '0x1x2'"),
        ("coordinator_on_ray --batches 17", "batches of at most 16"),
        ("encoder_cache --hidden 40", "--hidden: expected a multiple of 16"),
        ("encoder_cache --group-size 0", "--group-size: expected at least 1"),
        ("gpu_probe --only steps,nothing", "--only: no section is called 'nothing'; there are machine, attention,"),
        ("gpu_probe --layers 0", "--layers: expected at least 1, got 0"),
        ("gpu_probe --out nowhere/probe.json", "--out: there is no folder nowhere"),
        ("gpu_probe --small --out probe.md", "--out: expected a name that ends in .json, got probe.md"),
        ("gpu_probe --small --out notes.json", "notes.md would be replaced by the table of readings"),
        ("gpu_probe", "sees no accelerator here; --small --device cpu runs the code at test size"),
        ("just_in_time --updates 9", "--updates: expected at least 10"),
        ("lora_rollout nowhere", "no family is called 'nowhere'; there are qwen_image,"),
        ("lora_rollout --engine vllm_omni", "expected one family"),
        ("lora_rollout --width 100", "--width: expected a multiple of 96"),
        ("overlap_profiles --steps 0", "expected at least 1"),
        ("overlap_simulated nowhere", "no emulated recipe is called 'nowhere'"),
        ("overlap_simulated --seeds 0", "at least 1"),
        ("precision --updates 0", "--updates and --seeds: expected at least 1"),
        ("price --repeats 0", "--updates and --repeats: expected at least 1"),
        ("shared_prefix --groups 0", "--groups: expected at least 1"),
        ("shared_prefix --recipe nowhere.yaml", "nowhere.yaml: no such file"),
        ("stage_profile --out out --model tiny --repeats 1 --batches 0", "--batches"),
        ("stage_profile --out out --model tiny --repeats 1 --rest no_such", "no_such"),
        ("stage_profile --out out --model tiny --repeats 1 --pixels 40", "rollout.sampling.height"),
        ("stage_profile --out out --model tiny --repeats 1 --steps 1", "num_inference_steps"),
        ("what_if nowhere", "no emulated recipe is called 'nowhere'"),
    ],
)
def test_wrong_usage_starts_nothing(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    (tmp_path / "notes.md").write_text("My notes\n")
    name, *arguments = shlex.split(command)
    try:
        code = import_module(f"benchmarks.{name}").main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    shown = capsys.readouterr()
    assert said in " ".join((shown.out + shown.err).split())
    assert not list(tmp_path.rglob("*.json"))


def results_of(command: str, folder: Path) -> Any:
    name, *arguments = shlex.split(command)
    code = import_module(f"benchmarks.{name}").main([*arguments, "--out", str(folder)])
    assert code in (0, 1), "1: an arm was slower than it should be, which a miniature on a busy machine may be"
    return json.loads((folder / "results.json").read_bytes())


def test_control_plane_trains_groups_once(tmp_path: Path) -> None:
    entries: list[LedgerEntry] = []
    config = make_config(Shape(5, 3, 4), updates=4)
    asyncio.run(Roles(config, Coordinator(config, "run", [Prompt(0, "a")], [], entries.append)).play())
    assert sorted((entry.group, entry.event) for entry in entries) == [(group, "trained") for group in range(12)]
    record = measure(Shape(2, 2, 3), repeat=0, updates=4)
    assert record.samples == 24
    assert record.group_events_per_s == record.samples_per_s == pytest.approx(24 / record.seconds)
    assert 0 < record.coordinator_us == pytest.approx(1e6 * record.coordinator_seconds / 24)
    results = results_of("control_plane --shapes 1x2x2 3x2x2 --repeats 2 --samples 12", tmp_path)
    found = [(r["shape"]["engines"], r["repeat"], r["updates"]) for r in results["records"]]
    assert found == [(1, 0, 3), (3, 0, 3), (1, 1, 3), (3, 1, 3)]


@pytest.mark.virtual_time
@pytest.mark.parametrize(("batch", "most"), [(1, 2.5), (16, 0.5)])
async def test_a_sample_costs_the_coordinator_two_calls(batch: int, most: float, tmp_path: Path) -> None:
    """Counts all calls of the real roles, whose samples finish one by one or together, and those about samples."""
    config = coordinator_on_ray.config_of(8, batch)
    coordinator = coordinator_on_ray.Measured(config, tmp_path / "ledger.jsonl")
    roles = coordinator_on_ray.Workers(config, coordinator, LocalStore(), batch, rate=8.0)
    working = asyncio.create_task(roles.play())
    for seconds in (20.0, 40.0):
        await asyncio.sleep(seconds)
        reading = coordinator_on_ray.Reading(*await coordinator.reading())
    coordinator.close()
    await cancel([working])
    assert reading.samples > 200 and reading.calls_per_sample < most
    about_samples = sum(
        reading.calls.get(name, 0) for name in ("next_samples", "samples_done", "next_to_score", "scored")
    )
    assert about_samples <= 2.1 * reading.samples / batch * (1 if batch == 1 else 2), reading.calls
    assert batch > 1 or "report" not in reading.calls, "spans leave with other calls"


@pytest.mark.thorough
@pytest.mark.parametrize("family", list(lora_rollout._FAMILIES))
def test_adapters_draw_merged_samples(family: str, tmp_path: Path) -> None:
    small = "--width 96 --layers 1 --rank 2 --batch 1 --steps 2 --repeats 1"
    results = results_of(f"lora_rollout {family} {small}", tmp_path)
    assert results["differences"][family] < 1e-5
    assert [record["arm"] for record in results["records"]] == ["base", "merged", "unmerged"]


def test_prompts_are_encoded_once(tmp_path: Path) -> None:
    small = "--prompts 4 --epochs 2 --groups 2 --group-size 2 --validation 2 --every 2 --steps 2"
    records = results_of(f"encoder_cache {small}", tmp_path)["records"]
    calls = [[record["calls"] for record in records if record["arm"] == arm] for arm in encoder_cache.ARMS]
    assert calls == [[2, 2, 2, 0, 0, 0], [2, 2, 2, 2, 2, 2], [4, 2, 4, 4, 2, 4]]


def test_finished_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"synchronous": (0.7, 0.8), "just_in_time": (0.85, 0.9), "eager": (0.5, 0.6)}
    trained: list[just_in_time.Cell] = []

    def train(cell: just_in_time.Cell) -> just_in_time.Row:
        trained.append(cell)
        if cell.arm == "eager" and len(trained) == 3:
            raise KeyboardInterrupt
        update = {"loss": 0.0, "admission/starved_s": 0.25, "staleness/mean": 1.0}
        lines = [{"update": n, "wall_s": 2.0 * n, **update} for n in range(1, 21)]
        lines += [
            {"update": n, "validation/reward": r} for n, r in zip((0, 10, 20), (0.2, *ends[cell.arm]), strict=True)
        ]
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return just_in_time.measured(cell, metrics)

    monkeypatch.setattr(just_in_time, "_train", train)
    arguments = ["--csv", str(tmp_path / "runs.csv"), "--seeds", "1", "--updates", "20"]
    assert just_in_time.main(arguments) == 130
    assert just_in_time.main(arguments) == 0
    assert [cell.arm for cell in trained] == ["synchronous", "just_in_time", "eager", "eager"]
    capsys.readouterr()
    # The lanes of the second picture take seconds, and are tested in test_first_picture.py.
    lanes = Lanes({"trainer": [(0.0, 1.0)]}, [1.0], 1.0)
    monkeypatch.setattr(just_in_time, "lanes_of", lambda: (lanes, lanes))
    assert just_in_time.main([*arguments, "--picture", str(tmp_path / "new")]) == 0
    # .75 lies halfway from .7 (20 s) to .8 (40 s), and 11 / 13 of the way from .2 (0 s) to .85 (20 s).
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "| synchronous | 0.800 | 0.800 | 40 | 30: median 30 | 1.00 |",
        "| just in time | 0.900 | 0.900 | 40 | 17: median 17 | 1.00 |",
        "| eager | 0.600 | 0.600 | 40 | never | 1.00 |",
    ]
    for name in ("just_in_time.png", "sync_async.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("job", just_in_time.JOBS)
@pytest.mark.parametrize("arm", just_in_time.ARMS)
def test_arms_differ_in_admission_alone(job: str, arm: str) -> None:
    config = load(just_in_time._RECIPE, just_in_time.settings(just_in_time.Cell(job, arm, 3, 60)))
    budget = {"trainer_bound": 8, "quickstart": 2}[job]
    assert config.staleness.max_updates == (0 if arm == "synchronous" else budget)
    assert withholds(config) is (arm == "just_in_time")
    assert (config.run.seed, config.trainer.updates, config.run.runtime) == (3, 60, "ray")


def test_a_shared_prefix_saves_steps(tmp_path: Path) -> None:
    window = "rollout.num_inference_steps=4 'rollout.sde.window={size: 1, range: [2, 3]}'"
    small = f"{window} rollout.group_size=2 'reward.scorers=[{{name: jpeg_size}}]' --groups 1"
    results = results_of(f"shared_prefix {small}", tmp_path)
    assert [record["steps"] for record in results["records"]] == [8, 8, 6] and results["difference"] < 1e-5


def test_finished_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Cell] = []

    def train(cell: Cell) -> Row:
        trained.append(cell)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return Row(*cell, -1.8, 3.1, 0.65, 0.04, 0.12, 76.0)

    monkeypatch.setattr(precision, "_train", train)
    file = tmp_path / "cells.csv"
    arguments = ["--csv", str(file), "--corrections", "bypass", "auto", "--seeds", "1"]
    assert precision.main(arguments) == 130
    trained *= 2  # so that the next one ends well
    assert precision.main(arguments) == 0
    assert [cell.correction for cell in trained[4:]] == ["auto"]
    rows = [f"| 32 | `{name}` | -1.80 ± 3.10 | 65% | 0.120: 0.120 |" for name in ("bypass", "auto")]
    assert [*table(read_rows(file))][2:] == rows
