"""Tests that every command which shows a run, or a benchmark, marks its emulated parts where the reader begins."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omni_async.cli import main
from omni_async.commands.bench import table
from omni_async.commands.bench.page import page_of
from omni_async.commands.emulated import emulated
from omni_async.commands.watch.lives import Lives
from omni_async.commands.watch.now import now_section
from omni_async.records.read.follow import Follower
from tests.commands.bench.test_report import ANSWER, RESULT, arm, result, runs
from tests.commands.report.report_world import facts, section, written

RECIPE = "model: {pipeline: x, path: /m/tiny}\nreward: {scorers: [{name: ocr}]}\n"
EMULATION = "emulation: {profile: /profiles/toy.json, time_scale: 0.02}\n"
MARK = "Emulated: engines, scorers and trainer take the times of profile toy x 0.02; rewards are random"


def made(folder: Path, name: str = "made", emulation: str = EMULATION) -> Path:
    written(folder, [0.5] * 12, name=name)
    with (folder / "config.yaml").open("a") as config:
        config.write(RECIPE + emulation)
    return folder


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, ""),
        ({"emulation": None, "rollout": {"engine": "vllm_omni"}}, ""),
        ({"emulation": {"profile": "p/toy.json", "time_scale": 0.02}}, MARK),
        ({"emulation": {"profile": "toy"}}, MARK.replace(" x 0.02", "")),
        ({"rollout": {"engine": "emulated"}}, "Emulated engines: they run no model"),
        ({"emulation": "text", "rollout": [1]}, ""),
        ({"emulation": {"profile": 3, "time_scale": "much"}}, "Emulated: engines, scorers and trainer"),
        ({"emulation": {"profile": "https://me:hunter22@host/x\x1b[2J"}}, "profile x\\x1b[2J; "),
    ],
)
def test_the_recipe_names_its_emulated_parts(config: dict[str, Any], said: str) -> None:
    found = emulated(config)
    assert said in found and bool(said) == bool(found) and "hunter22" not in found


def test_a_report_begins_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = section("verdict", folder := made(tmp_path / "run"))
    assert found["blocks"][0] == {"kind": "text", "text": f"{MARK}.", "tone": "warning"}
    shown = facts(found)
    assert shown["model"] == ("x", "not loaded: emulated") and shown["reward"] == ("ocr", "not called: emulated")
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == MARK


def test_a_comparison_names_the_emulated_runs(tmp_path: Path) -> None:
    runs = made(tmp_path / "a", "sync"), made(tmp_path / "b", "real", "rollout: {workers: 2}\n")
    assert section("verdict", *runs)["blocks"][0]["text"] == f"{MARK}: sync, seed 0."
    assert section("verdict", *runs)["title"] == "real and sync are not comparable" and not facts(
        {**section("verdict", *runs), "tabs": []}
    )
    both = made(tmp_path / "c", "async")
    assert section("verdict", runs[0], both)["blocks"][0]["text"] == f"{MARK}."


def test_the_live_page_begins_with_them(tmp_path: Path) -> None:
    follower = Follower(made(tmp_path / "run"))
    assert [*follower.poll()]
    first, then = now_section(follower, "killed", None, [], [], None)["blocks"][:2]
    assert first == {"kind": "text", "text": f"{MARK}.", "tone": "warning"} and then["kind"] == "facts"


def test_status_begins_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(made(tmp_path / "run"))]) == 0
    assert capsys.readouterr().out.splitlines()[0] == MARK


async def test_lists_of_runs_mark_emulated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "fast-20260102-120000")
    made(tmp_path / "real-20260101-120000", emulation="emulation: null\n")
    assert main(["runs", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1:3] for row in rows] == [["killed,", "emulated"], ["killed", "12"]]
    lives = Lives(tmp_path, is_one=False)
    assert [one["emulated"] for one in await lives.listed()] == [True, False]


def test_a_benchmark_has_them_below_its_answer() -> None:
    config = {"emulation": {"profile": "toy.json", "time_scale": 1.0}}
    mark = MARK.replace(" x 0.02", "")
    overlap = result(arm("sync", runs=runs(8.0), config=config), arm("async:2", 2, runs=runs(5.0), config=config))
    assert table.markdown(overlap).splitlines()[2] == f"{mark}."
    terminal = Console(file=(out := io.StringIO()), force_terminal=True, width=140)
    table.show(overlap, terminal)
    assert f"{mark}." in out.getvalue()
    first = page_of(overlap)["sections"][0]["blocks"][0]
    assert (first["text"], first["tone"]) == (f"{mark}.", "warning")
    for real in (ANSWER, RESULT):
        assert "Emulated" not in table.markdown(real)
