"""Tests that no command's result replaces its input, and that a failed write leaves the former result.

tests/commands/export, tests/commands/evaluation and tests/commands/bench have the commands that write folders."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_async import cli
from omni_async.commands.command_line import as_csv
from omni_async.performance.profile import write_profile
from tests.config.test_writing import largest_file
from tests.runtime.runtime_world import write_world
from tests.simulation.tune.tune_world import PROFILE, RECIPE

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a recipe, what it extends and names, and samples to score, and works there."""
    reward = {"scorers": [{"name": "tests.commands.scoring.judges:Red"}], "backoff_s": 0, "probe": False}
    write_world(tmp_path, reward=reward)
    monkeypatch.chdir(tmp_path)
    Path("above.yaml").write_text("extends: recipe.yaml\n")
    Path("images").mkdir()
    Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save("images/a.png")
    Path("images/a.txt").write_text("a cat")
    Path("table.jsonl").write_text(json.dumps({"prompt": "a dog", "image": "images/a.png"}) + "\n")
    return tmp_path


def refused(capsys: Capture, *words: str | Path) -> str:
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def named(path: str, way: str) -> str:
    """Returns another name of a file."""
    other = f"other{Path(path).suffix}"
    if way == "link":
        Path(other).symlink_to(Path(path).absolute())
    elif way == "hard link":
        os.link(path, other)
    return path if way == "itself" else other


@pytest.mark.parametrize("way", ["itself", "link", "hard link"])
@pytest.mark.parametrize("given", ["above.yaml", "recipe.yaml", "table.jsonl", "images/a.txt", "images/a.png"])
def test_score_keeps_its_inputs(workplace: Path, capsys: Capture, given: str, way: str) -> None:
    path, option = named(given, way), "--grid" if given.endswith("png") else "--json"
    before = content(workplace)
    said = refused(capsys, "score", "above.yaml", "images", "table.jsonl", option, path)
    assert said == f"omni-async: {option}: {path} is read by this command; name another file"
    assert content(workplace) == before


def test_two_results_are_two_files(capsys: Capture) -> None:
    said = refused(capsys, "score", "recipe.yaml", "images", "--json", "x.png", "--grid", "./x.png")
    assert said == "omni-async: --grid: x.png is written by --json, too; name another file"


@pytest.mark.parametrize(
    "command",
    [
        *(f"{command} above.yaml --profile steady.json" for command in ("simulate", "tune --devices 4")),
        "parity above.yaml emulation.profile=steady.json",
    ],
)
@pytest.mark.parametrize("given", ["above.yaml", "recipe.yaml", "steady.json", "prompts.txt", "model/new.json"])
def test_predictions_keep_their_inputs(workplace: Path, capsys: Capture, command: str, given: str) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    write_profile(workplace / "steady.json", PROFILE)
    before = content(workplace)
    said = refused(capsys, *command.split(), "--json", given)
    assert said == f"omni-async: --json: {given} is read by this command; name another file"
    assert content(workplace) == before


@pytest.mark.parametrize(
    "part", ["metrics.jsonl", "config.yaml", "samples/train-000001.png", "checkpoints/new/page.html"]
)
def test_reports_keep_the_run(workplace: Path, capsys: Capture, part: str) -> None:
    run = workplace / "run"
    (run / "samples").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml", "samples/train-000001.png"):
        (run / name).write_bytes(b"")
    said = refused(capsys, "report", run, "--out", run / part)
    assert said == f"omni-async: --out: {run / part} is read by this command; name another file"


def test_full_disk(workplace: Path, capsys: Capture) -> None:
    for name in ("page.md", "found.json", "rows.csv", "grid.png"):
        Path(name).write_bytes(b"former")
    scores = "score recipe.yaml images --json found.json --out rows.csv --grid grid.png"
    for words in ("docs --out page.md", scores):
        with largest_file(20):
            assert cli.main(words.split()) in (1, 2)
    assert all(Path(name).read_bytes() == b"former" for name in ("page.md", "found.json", "rows.csv", "grid.png"))
    assert not [*workplace.glob(".*.partial*")]


def test_no_formulas_in_csv(capsys: Capture) -> None:
    Path("images/a.txt").write_text('=HYPERLINK("http://x")')
    rows = [{"prompt": text, "image": "images/a.png"} for text in ("-1+1", "@a", "+1", "a=1", "-")]
    Path("table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["score", "recipe.yaml", "images", "table.jsonl", "--out", "rows.csv"]) == 0
    with Path("rows.csv").open(newline="") as file:
        texts = [row["prompt"] for row in csv.DictReader(file)]
    assert texts == ['\'=HYPERLINK("http://x")', "'-1+1", "'@a", "'+1", "a=1", "'-"]
    assert as_csv([{"a": -1.5, "b": "\t=1", "c": None}]) == b"a,b,c\r\n-1.5,'\t=1,\r\n"


def test_results_without_samples(workplace: Path, capsys: Capture) -> None:
    Path("grid.png").write_bytes(b"former")
    assert cli.main(["score", "recipe.yaml", "images", "reward.max_abs=1e-9", "--grid", "grid.png"]) == 1
    err = capsys.readouterr().err
    assert "omni-async: grid.png: not written, because no sample has a score\n" in err and ".partial" not in err
    assert Path("grid.png").read_bytes() == b"former" and "could not be written" not in err
