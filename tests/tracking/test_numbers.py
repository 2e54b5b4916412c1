"""Tests metrics, summary, images and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_async.tracking import images
from omni_async.tracking.images import Typeface, _wrap, caption, image_grid
from omni_async.tracking.memory import MemorySampler, process_tree_pss
from omni_async.tracking.summary import Counters, ValidationPoint, read_summary, summarise, write_summary
from omni_async.types import Prompt, Score, Span


def test_a_summary_goes_through_its_file(tmp_path: Path) -> None:
    summary = summarise(
        run="r-1",
        status="done",
        started=10.0,
        finished=20.0,
        images=40,
        rewards=[0.0] * 5 + [0.5] + [1.0] * 5,
        staleness=[0, 1, 1],
        counters=Counters(admitted=6, trained=3, rejected=1, dropped=1, live=1),
        spans=[
            Span("rollout-0", "generate", 10, 20),
            Span("trainer", "train", 15, 25),
            Span("reward-0", "score", 15, 16),
        ],
        devices=2,
        reject_reasons={"zero variance": 1},
        validation=[ValidationPoint(5, 0.5), ValidationPoint(0, 0.1, {"ocr": 0.1})],
        peak_memory_bytes=5,
    )
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary
    assert (summary.images_per_s, summary.images_per_s_per_device) == (4.0, 2.0)
    assert summary.conserved and summary.updates == 11 and summary.overlap_fraction == pytest.approx(0.5)
    assert (summary.first_reward, summary.last_reward) == (0.0, 1.0)
    assert summary.staleness == {0: 1, 1: 2} and summary.staleness_max == 1
    assert [p.version for p in summary.validation] == [0, 5]
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes())["busy"]["trainer"]["busy"] == 0.5


def test_images_per_second_are_those_of_attempts_whose_time_is_known() -> None:
    nothing = Counters(admitted=0, trained=0, rejected=0, dropped=0, live=0)
    known = {"rewards": [], "staleness": [], "counters": nothing, "spans": [], "devices": 2}
    summary = summarise(
        run="r", status="done", started=10, finished=20, images=90, wall_before=5.0, untimed_images=60, **known
    )
    assert (summary.images, summary.wall_s) == (90, 15.0)
    assert (summary.images_per_s, summary.images_per_s_per_device) == (2.0, 1.0)


def test_a_run_that_never_trained_has_a_summary() -> None:
    nothing = Counters(admitted=1, trained=0, rejected=0, dropped=0, live=0)
    summary = summarise(
        run="r",
        status="failed",
        reason="x",
        started=1,
        finished=1,
        images=0,
        rewards=[],
        staleness=[],
        counters=nothing,
        spans=[],
        devices=0,
    )
    assert (
        summary.first_reward is None
        and summary.staleness_max is None
        and not summary.conserved
        and summary.images_per_s == 0.0
    )


def test_a_grid_enlarges_small_images_and_writes_captions_below() -> None:
    red = np.full((64, 64, 3), (200, 0, 0), np.uint8)
    text = caption(Prompt(index=0, text="the digit " + "very " * 60 + "unbreakable" * 20), Score(value=0.5, text="8"))
    grid = image_grid([(red, text), (red, "short"), (red, "")], columns=2)
    pixels = np.asarray(grid)
    assert grid.width == 2 * (192 + 6) + 6
    assert (pixels[6:198, 6:198] == (200, 0, 0)).all()
    below = pixels[200:260, 6:198]
    assert (below.max(axis=2) > 200).any(), "a caption is drawn"
    assert grid.height > 2 * 192
    assert text.startswith("reward 0.50  read '8'\nthe digit")


def test_captions_in_other_scripts_are_drawn_and_nothing_is_a_box() -> None:
    face = Typeface(12)
    for text in ("größe, naïve", "Ελλάδα", "Привет, мир", "שלום", "→ ☃"):
        assert face.text(text) == text
        drawn = [
            bytes(font.getmask(character)) for font, run in face._runs(text) for character in run if character != " "
        ]
        missing = {bytes(font.getmask("\U0010ffff")) for font, _ in face._runs(text)}
        assert drawn and missing.isdisjoint(drawn)


def test_characters_that_no_font_has_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_wide", list)
    images._fonts.cache_clear()
    try:
        face = Typeface(12)
        assert face.text("says 你好!") == "says U+4F60 U+597D!"
        assert face.text("a 🚀, \x07 and \ud800") == "a [rocket], U+0007 and U+D800"
    finally:
        images._fonts.cache_clear()


def test_the_text_that_was_read_is_shown_unchanged() -> None:
    assert caption(Prompt(0, "ein Schild"), Score(0.5, text="größe\n")) == "reward 0.50  read 'größe\\n'\nein Schild"


def test_a_text_without_spaces_is_broken_and_not_cut_after_one_line() -> None:
    lines = _wrap("x" * 60, Typeface(12), 192)
    assert len(lines) > 1 and "".join(lines) == "x" * 60
    lines = _wrap("x" * 600, Typeface(12), 192)
    assert len(lines) == 4 and lines[-1].endswith("x...")
    assert all(Typeface(12).length(line) <= 192 for line in lines)


def test_a_grid_reduces_large_images_and_refuses_others() -> None:
    assert image_grid([(np.zeros((512, 1024, 3), np.uint8), "x")]).width == 384 + 12
    with pytest.raises(ValueError, match="at least one"):
        image_grid([])
    with pytest.raises(ValueError, match=r"expected a uint8 image .*float32"):
        image_grid([(np.zeros((8, 8, 3), np.float32), "x")])


def test_memory_counts_descendants_once_and_only_while_they_live() -> None:
    sampler = MemorySampler(interval_s=0.05)
    sampler.start()
    alone = process_tree_pss(os.getpid())
    hog = "import sys; x = bytearray(200 << 20); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"up\n"
        both = process_tree_pss(os.getpid())
        assert both - alone > 190 << 20
        assert abs(process_tree_pss(os.getpid(), child.pid) - both) < 50 << 20
        time.sleep(0.2)
        child.stdin.close()
    assert process_tree_pss(child.pid) == 0
    assert sampler.stop() >= alone + (190 << 20)
