"""Tests that a foreign gallery leads nowhere and holds no number out of range."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_async import cli
from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import Model
from omni_async.commands.evaluation.results import compare
from omni_async.config import ConfigError
from omni_async.types import Score


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
    write_score(folder, '{"value": 0.5}')
    return folder


def write_score(folder: Path, score: str) -> None:
    (folder / "scores.jsonl").write_text(f'{{"model": "base", "prompt": 0, "sample": 0, "score": {score}}}\n')


def drawn(gallery: Gallery) -> list[str]:
    return sorted(gallery._drawn["base"])


@pytest.mark.parametrize("image", ["link.png", "../secret.png", "/dev/zero", "..", "", "a\0b", "pipe.png", 7, ["x"]])
def test_a_row_names_no_file_outside(given, image):
    (given / "base" / "000-0.png").rename("secret.png")
    (given / "base" / "link.png").symlink_to(Path("secret.png").absolute())
    os.mkfifo(given / "base" / "pipe.png")
    (given / "base" / "samples.jsonl").write_text(json.dumps({"prompt": "a", "image": image}) + "\n")
    with opened() as gallery:
        assert drawn(gallery) == []


@pytest.mark.parametrize("what", ["base", "settings.json", "settings.json, a pipe", "samples", "scores.jsonl"])
def test_no_link_leads_a_gallery_elsewhere(given, what):
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
def test_damaged_settings_are_one_line(given, settings):
    (given / "settings.json").write_bytes(settings)
    with pytest.raises(ConfigError, match=r"settings\.json is damaged"):
        opened()


@pytest.mark.parametrize(
    "score",
    [
        '{"value": 1e160}',
        '{"value": -1e300}',
        '{"value": 0.5, "parts": {"a": 1e160}}',
        json.dumps({"value": 0.5, "parts": {str(part): 0.0 for part in range(257)}}),
        json.dumps({"value": 0.5, "parts": {"n" * 101: 0.0}}),
    ],
)
def test_a_score_out_of_range_is_refused(given, score):
    """Squares of larger ones are infinite, and statistics warn or fail."""
    write_score(given, score)
    with pytest.raises(ConfigError, match=r"scores\.jsonl is damaged: the score of 'base', prompt 0, is out of range"):
        opened()


@pytest.mark.parametrize(
    ("score", "found"),
    [
        ('{"value": 1e100}', {(0, 0): Score(1e100)}),
        *((f'{{"value": {value}}}', {}) for value in ("1e400", "NaN", "true", '"1"')),
    ],
)
def test_a_score_that_is_no_number_is_passed_over(given, score, found):
    write_score(given, score)
    with opened() as gallery:
        assert drawn(gallery) == ["000-0"] and gallery.scores["base"] == found
        assert bool(compare(["base"], gallery.scores, [], 1).rows) is bool(found)


def test_what_a_killed_writer_left_is_no_other_content(given):
    folder = given.with_name("killed")
    folder.mkdir()
    (folder / ".settings.1-0123456789abcdef.partial.json").touch()
    with Gallery(folder, {}, []) as gallery:
        assert (gallery.folder / "settings.json").exists()


@pytest.mark.parametrize("out", ["model", "model/drawn", "link/drawn"])
def test_samples_are_not_drawn_into_a_model(checkpoint, tmp_path, capsys, out):
    Path("model").symlink_to(checkpoint)
    Path("link").symlink_to("model")
    words = ["sample", "model", "--prompt", "x", "height=32", "width=32", "--out", out]
    assert cli.main(words) == 2
    assert f"--out: {out} is in " in capsys.readouterr().err
    assert not (Path(checkpoint) / "drawn").exists() and not (Path(checkpoint) / "settings.json").exists()
