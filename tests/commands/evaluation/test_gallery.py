"""Tests what a gallery's folder from elsewhere may hold: nothing leads out of it, and no number is out of range."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from omni_async import cli
from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import Model
from omni_async.commands.evaluation.results import compare, write
from omni_async.config import ConfigError
from omni_async.types import Prompt, Score


class Base(Model):
    def identity(self) -> str:
        return "weights"


MODEL = Base("base", Path("model"))


def opened() -> Gallery:
    return Gallery(Path("given"), {"seed": 1}, [MODEL])


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Makes a gallery with a sample and its score."""
    with opened():
        pass
    folder = tmp_path / "given"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / "base" / "000-0.png")
    (folder / "base" / "samples.jsonl").write_text(json.dumps({"prompt": "a", "image": "000-0.png"}) + "\n")
    (folder / "scores.jsonl").write_text(
        json.dumps({"model": "base", "prompt": 0, "sample": 0, "score": {"value": 0.5}}) + "\n"
    )
    return folder


def drawn(gallery: Gallery) -> list[str]:
    return sorted(gallery._drawn["base"])


def test_a_gallery_is_read_again(given: Path) -> None:
    with opened() as gallery:
        assert drawn(gallery) == ["000-0"] and gallery.scores["base"] == {(0, 0): Score(0.5)}


@pytest.mark.parametrize("image", ["link.png", "../secret.png", "/dev/zero", "..", "", "a\0b", "pipe.png", 7, ["x"]])
def test_a_row_names_no_file_outside(given: Path, image: Any) -> None:
    (given / "base" / "000-0.png").rename("secret.png")
    (given / "base" / "link.png").symlink_to(Path("secret.png").absolute())
    os.mkfifo(given / "base" / "pipe.png")
    (given / "base" / "samples.jsonl").write_text(json.dumps({"prompt": "a", "image": image}) + "\n")
    with opened() as gallery:
        assert drawn(gallery) == []


@pytest.mark.parametrize("what", ["base", "settings.json", "settings.json, a pipe", "samples", "scores.jsonl"])
def test_no_link_leads_a_gallery_elsewhere(given: Path, what: str) -> None:
    path = given / {"samples": "base/samples.jsonl"}.get(what, what.partition(",")[0])
    path.rename("elsewhere")
    before = {str(file): file.read_bytes() for file in Path("elsewhere").rglob("*") if file.is_file()}
    if "pipe" in what:
        os.mkfifo(path)
    else:
        path.symlink_to(Path("elsewhere").absolute())
    with pytest.raises(ConfigError, match="--out: "):
        opened()
    assert before == {str(file): file.read_bytes() for file in Path("elsewhere").rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "settings", [b"[]", b"{", b"\xff", b'{"models": 3}', b"[" * 100_000, b'{"a": [' + b"{}," * 10**6]
)
def test_damaged_settings_are_one_line(given: Path, settings: bytes) -> None:
    (given / "settings.json").write_bytes(settings)
    with pytest.raises(ConfigError, match=r"settings\.json is damaged"):
        opened()


@pytest.mark.parametrize(
    ("score", "is_left"),
    [
        ('{"value": 1e160}', None),
        ('{"value": -1e300}', None),
        ('{"value": 0.5, "parts": {"a": 1e160}}', None),
        (json.dumps({"value": 0.5, "parts": {str(part): 0.0 for part in range(257)}}), None),
        (json.dumps({"value": 0.5, "parts": {"n" * 101: 0.0}}), None),
        ('{"value": 1e400}', False),
        ('{"value": NaN}', False),
        ('{"value": true}', False),
        ('{"value": "1"}', False),
        ('{"value": 1e100}', True),
    ],
)
def test_a_score_is_in_the_range_of_scores(given: Path, score: str, is_left: bool | None) -> None:
    """Squares of larger ones are infinite, and statistics warn or fail."""
    (given / "scores.jsonl").write_text(f'{{"model": "base", "prompt": 0, "sample": 0, "score": {score}}}\n')
    if is_left is None:
        with pytest.raises(
            ConfigError, match=r"scores\.jsonl is damaged: the score of 'base', prompt 0, is out of range"
        ):
            opened()
        return
    with opened() as gallery:
        results = compare(["base"], gallery.scores, [], 1)
        assert bool(results.rows) is is_left


def test_what_a_killed_writer_left_is_no_other_content(given: Path) -> None:
    folder = given.with_name("killed")
    folder.mkdir()
    (folder / ".settings.1-0123456789abcdef.partial.json").touch()
    with Gallery(folder, {}, []) as gallery:
        assert (gallery.folder / "settings.json").exists()


def test_cells_of_results_are_no_formulas(tmp_path: Path) -> None:
    scores = {"base": {(0, 0): Score(-0.5, {"a": -1.0}, "@SUM(1)")}}
    requests = [cast(Any, _Request(Prompt(0, "=1+1", "+x")))]
    write(tmp_path, compare(["base"], scores, [], 1), [MODEL], requests, scores)
    with (tmp_path / "scores.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["text"], row["target"], row["read"], row["reward"]) == ("'=1+1", "'+x", "'@SUM(1)", "-0.5")


class _Request:
    sample = 0

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt


@pytest.mark.parametrize("out", ["model", "model/drawn", "link/drawn"])
def test_samples_are_not_drawn_into_a_model(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    Path("model").symlink_to(checkpoint)
    Path("link").symlink_to("model")
    words = ["sample", "model", "--prompt", "x", "height=32", "width=32", "--out", out]
    assert cli.main(words) == 2
    assert f"--out: {out} is in " in capsys.readouterr().err
    assert not (Path(checkpoint) / "drawn").exists() and not (Path(checkpoint) / "settings.json").exists()
