"""Tests the prompts, columns and paths that `omni-async init` accepts."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omni_async import cli
from omni_async.config import Config, load
from omni_async.data.tables import SUFFIXES
from omni_async.runtime.preflight.check import preflight
from tests.support.places import ROOT

MODEL = ["--model", str(ROOT / "recipes" / "quickstart" / "checkpoint"), "--devices", "0"]
SMALL = ["rollout.sampling.height=64", "rollout.sampling.width=64"]
ROWS = {"caption": [f"a sign with {i}" for i in range(12)], "answer": [str(i) for i in range(12)]}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(ROWS), tmp_path / "p.parquet")
    return tmp_path


def written(*arguments: str) -> Config:
    """Returns the recipe that the command writes in another folder, as `check` accepts it."""
    assert cli.main(["init", "new/my.yaml", "--yes", *MODEL, *SMALL, *arguments]) == 0
    config = load("new/my.yaml")
    preflight(config, elsewhere=True)
    return config


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["init", "my.yaml", "--yes", *MODEL, *SMALL, *arguments]) == 2
    assert not Path("my.yaml").exists()
    return capsys.readouterr().err.removeprefix("omni-async: ").rstrip()


@pytest.mark.parametrize("prompts", [["--prompts", "p.parquet"], ["data.prompts=p.parquet"]])
@pytest.mark.parametrize(
    "columns",
    [
        ["data.columns.prompt=caption", "data.columns.target=answer"],
        ["data.columns={prompt: caption, target: answer}"],
    ],
)
def test_prompts_are_read_by_the_overridden_columns(workplace, prompts, columns):
    config = written(*prompts, *columns)
    assert config.data.prompts == str(workplace / "p.parquet")
    assert config.data.columns == {"prompt": "caption", "target": "answer"}
    assert config.reward.scorers[0].name == "ocr"  # proposed, because every prompt has a target


def test_validation_prompts_are_read_by_the_same_columns(workplace):
    pq.write_table(pa.table({"caption": ["a tree"], "answer": ["x"]}), workplace / "v.parquet")
    columns = ["data.columns.prompt=caption", "data.columns.target=answer"]
    config = written("--prompts", "p.parquet", "--validation", "v.parquet", *columns)
    assert config.validation is not None and config.validation.prompts == str(workplace / "v.parquet")


def test_a_wrong_column_is_reported_once(capsys):
    said = refused(capsys, "--prompts", "p.parquet")
    assert said == (
        "--prompts: p.parquet: row 0: expected a field `prompt`, got caption, answer; name its column, as"
        " data.columns.prompt=caption (also 11 more: row 1, 2, 3, 4, 5, ...)"
    )
    said = refused(capsys, "data.prompts=p.parquet", "data.columns.prompt=captoin")
    why = "no row has 'captoin', which data.columns.prompt names; it has caption, answer"
    assert said == f"data.prompts: p.parquet: {why}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.columns=caption", "data.columns"),
        ("data=3", "data"),
        ("validation.prompts=3", "validation.prompts"),
        ("validation=3", "validation"),
    ],
)
def test_a_wrong_value_has_its_key(capsys, override, key):
    (Path("p.txt")).write_text("a cat\n")
    said = refused(capsys, "--prompts", "p.txt", override)
    assert said.startswith(f"my.yaml: {key}: expected ") and "got " in said and "\n" not in said


def test_a_folder_or_a_data_set_of_the_hubs_cache_is_taken(workplace, monkeypatch):
    snapshot = workplace / "hub" / "datasets--owner--signs" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    pq.write_table(pa.table({"prompt": ["a cat", "a dog"]}), snapshot / "train.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workplace / "hub"))
    for given, name in (("owner/signs", "hub.yaml"), (str(snapshot), "folder.yaml")):
        arguments = ["--prompts", given, "--reward", "jpeg_size"]
        assert cli.main(["init", name, "--yes", *MODEL, *SMALL, *arguments]) == 0
        assert load(name).data.prompts == str(snapshot)


@pytest.mark.parametrize("folder", [".", "scorers"])
def test_a_scorers_file_is_found_from_the_recipes_folder(workplace, folder):
    file = workplace / folder / "mine.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("def size(images, prompts):\n    return [image.size for image in images]\n")
    (workplace / "p.txt").write_text("a cat\na dog\n")
    config = written("--prompts", "p.txt", "--reward", f"{folder}/mine.py:size")
    assert config.reward.scorers[0].name == f"{file}:size"


@pytest.mark.parametrize(
    ("num", "arguments", "split"),
    [
        (12, [], None),
        (12, ["--validation", "split"], 0.1),
        (12, ["validation.split=0.25"], 0.25),
        (12, ["validation={split: 3}"], 3),
        (20, [], 0.1),
        (20, ["--validation", "none"], None),
        (20, ["validation=null"], None),
        (20, ["validation.split=4"], 4),
    ],
)
def test_a_split_is_proposed_or_given(workplace, num, arguments, split):
    (workplace / "p.txt").write_text("".join(f"a sign with {i}\n" for i in range(num)))
    config = written("--prompts", "p.txt", "--reward", "jpeg_size", *arguments)
    assert (config.validation and config.validation.split) == split
    text = " ".join(Path("new/my.yaml").read_text().replace("#", "").split())
    assert ("validation.split=0.1 holds out a tenth" in text) is (split is None and "validation=null" not in arguments)


def test_a_split_is_taken_instead_of_the_file_next_to_the_prompts(workplace):
    for name in ("train", "test"):
        (workplace / f"{name}.txt").write_text("a cat\na dog\n")
    arguments = ["--prompts", "train.txt", "--reward", "jpeg_size"]
    assert cli.main(["init", "beside.yaml", "--yes", *MODEL, *SMALL, *arguments]) == 0
    assert load("beside.yaml").validation.prompts == str(workplace / "test.txt")
    config = written(*arguments, "validation.split=1")
    assert (config.validation.prompts, config.validation.split) == (None, 1)


def test_the_help_names_every_table(capsys):
    with pytest.raises(SystemExit):
        cli.main(["init", "--help"])
    shown = capsys.readouterr().out
    assert all(suffix in shown for suffix in SUFFIXES)
