"""Tests samples over time: the same prompt and noise is one strip, and a page holds a bounded number of bytes."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_async.commands.report import pictures
from omni_async.commands.report.data import page_of
from omni_async.commands.report.file import one_file
from omni_async.commands.report.pictures import samples
from omni_async.commands.report.shown import show
from omni_async.records.read.record import read_run
from omni_async.records.write.images import image_grid


def write_round(
    folder: Path, version: int, rows: list[dict[str, Any]], side: int = 16, kind: str = "validation"
) -> None:
    """Writes a round's table, and an image of noise per row."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").touch()
    name = f"{kind}-{version:06d}"
    noise = np.random.default_rng(version)
    for number, row in enumerate(rows):
        row = row | {"image": f"{name}-{number:02d}.png"}
        pixels = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "samples" / row["image"])
        with (folder / "samples" / f"{name}.jsonl").open("a") as table:
            table.write(json.dumps(row) + "\n")
    Image.new("RGB", (side, side)).save(folder / "samples" / f"{name}.png")


def block(folder: Path) -> Any:
    (tab,) = samples(show([read_run(folder)])).tabs
    (found,) = tab.blocks
    return found


def image_of(src: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2])))


def test_a_strip_is_one_prompt_and_noise_even_where_a_round_lacks_samples(tmp_path):
    seven, one = {"prompt": "a digit", "target": "7", "reward": 0.5}, {"prompt": "a digit", "target": "1"}
    write_round(tmp_path, 0, [seven, one, seven])
    write_round(tmp_path, 20, [one, seven])
    found = block(tmp_path)
    assert found.versions == [0, 20] and found.paired and found.pixelated
    assert [(strip.prompt, strip.target) for strip in found.strips] == [
        ("a digit", "7"),
        ("a digit", "1"),
        ("a digit", "7"),
    ]
    drawn = [[bool(frame.src) for frame in strip.frames] for strip in found.strips]
    assert drawn == [[True, True], [True, True], [True, False]]
    first = (tmp_path / "samples" / "validation-000020-01.png").read_bytes()
    assert base64.b64decode(found.strips[0].frames[1].src.partition(",")[2]) == first  # small ones as they are
    assert found.strips[0].frames[0].reward == 0.5 and found.strips[1].frames[0].reward is None


def test_texts_are_shown_as_texts(tmp_path):
    """A page keeps their beginning, whatever markup they hold."""
    write_round(tmp_path, 0, [])
    markup = "<script>alert(1)</script>"
    for version, text in ((0, markup), (20, "7" * 5000)):
        Image.new("RGB", (16, 16)).save(tmp_path / "samples" / f"validation-{version:06d}.png")
        row = {"prompt": "a digit", "target": "7", "reward": 0.5, "text": text, "finish": "stop"}
        (tmp_path / "samples" / f"validation-{version:06d}.jsonl").write_text(json.dumps(row) + "\n")
    found = block(tmp_path)
    (strip,) = found.strips
    assert [(frame.medium, frame.src, frame.reward) for frame in strip.frames] == [("text", "", 0.5)] * 2
    assert [frame.text for frame in strip.frames] == [markup, "7" * 2000] and found.note == ""
    assert markup not in one_file(page_of([read_run(tmp_path)], "now", ["samples"]))


def test_an_answer_is_shown_with_the_image_of_its_prompt(tmp_path):
    write_round(tmp_path, 0, [])
    for version in (0, 20):
        name = f"validation-{version:06d}"
        for file in (f"{name}.png", f"{name}-00-question.png"):
            Image.new("RGB", (16, 16)).save(tmp_path / "samples" / file)
        row = {"prompt": "How many?", "text": f"{version}", "question": f"{name}-00-question.png"}
        (tmp_path / "samples" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (strip,) = block(tmp_path).strips
    assert image_of(strip.question).size == (16, 16)
    assert [frame.text for frame in strip.frames] == ["0", "20"]


def test_large_images_are_reduced_and_films_come_along(tmp_path):
    write_round(tmp_path, 0, [{"prompt": "large"}, {"prompt": "film", "video": "clip.mp4"}], side=400)
    (tmp_path / "samples" / "clip.mp4").write_bytes(b"film")
    large, film = (strip.frames[0] for strip in block(tmp_path).strips)
    assert large.src.startswith("data:image/webp;base64,") and image_of(large.src).size == (320, 320)
    assert (film.medium, film.src) == ("video", f"data:video/mp4;base64,{base64.b64encode(b'film').decode()}")


def test_what_does_not_fit_is_left_out_and_said(tmp_path, monkeypatch):
    for version in range(30):
        write_round(tmp_path, version, [{"prompt": f"{n}"} for n in range(20)])
    found = block(tmp_path)
    assert len(found.versions) == 24 and len(found.strips) == 16
    assert (found.versions[0], found.versions[-1]) == (0, 29)
    assert "24 of 30 rounds and 16 of 20 samples" in found.note
    monkeypatch.setattr(pictures, "_MOST_BYTES", 2000)
    found = block(tmp_path)
    assert sum(bool(frame.src) for strip in found.strips for frame in strip.frames) == 2
    assert "left out, to keep the page small" in found.note


def test_without_validation_the_grids_of_training_are_shown_and_without_any_that_is_said(tmp_path):
    write_round(tmp_path / "run", 10, [{"prompt": "a"}], kind="train")
    found = block(tmp_path / "run")
    assert not found.paired and found.versions == [10] and "differ from update to update" in found.note
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.yaml").touch()
    assert "No samples were written" in block(tmp_path / "none").text


def test_a_grid_of_training_that_is_left_out_is_named(tmp_path, monkeypatch):
    write_round(tmp_path, 10, [{"prompt": "a"}], kind="train")
    write_round(tmp_path, 20, [{"prompt": "a"}], side=300, kind="train")
    assert "left out" not in block(tmp_path).note
    captioned = (np.zeros((400, 400, 3), np.uint8), "a long caption " * 40)
    of_sixteen = image_grid([captioned] * 16)
    assert of_sixteen.width * of_sixteen.height * 16 < pictures._MOST_PIXELS  # a run may show 256
    monkeypatch.setattr(pictures, "_MOST_PIXELS", 80_000)
    found = block(tmp_path)
    assert [bool(frame.src) for frame in found.strips[0].frames] == [True, False]
    assert "Some media are left out" in found.note


def test_a_damaged_image_is_left_out(tmp_path):
    write_round(tmp_path, 0, [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / "samples" / "validation-000000-00.png").write_bytes(b"no image")
    a, b = block(tmp_path).strips
    assert a.frames[0].src == "" and b.frames[0].src


def test_a_table_leads_to_no_other_files_and_no_image_fills_the_memory(tmp_path):
    secret = tmp_path.with_name(f"{tmp_path.name}-secret.mp4")
    secret.write_bytes(b"secret")
    rows = [{"prompt": "link", "video": "clip.mp4"}, {"prompt": "table", "video": "validation-000000.jsonl"}]
    write_round(tmp_path, 0, [*rows, {"prompt": "bomb"}])
    (tmp_path / "samples" / "clip.mp4").symlink_to(secret)
    bomb = tmp_path / "samples" / "validation-000000-02.png"
    content = bytearray(bomb.read_bytes())
    content[16:24] = struct.pack(">II", 30_000, 30_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    bomb.write_bytes(content)
    link, table, large = (strip.frames[0] for strip in block(tmp_path).strips)
    assert (link.medium, table.medium, large.src) == ("image", "image", "")


@pytest.mark.parametrize(("count", "most", "chosen"), [(3, 5, [0, 1, 2]), (9, 3, [0, 4, 8]), (0, 3, [])])
def test_what_is_chosen_is_evenly_apart_with_both_ends(count, most, chosen):
    assert pictures._evenly(count, most) == chosen
