"""Tests the benchmark of held bytes on samples of kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.buffer_bytes import main

_SMALL = ["--trajectory", "12KiB", "--media", "4KiB", "--updates", "8"]


def test_held_stays_within_the_bound_and_not_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--max-bytes", "192KiB", "--out", str(tmp_path)]) == 0
    assert "most held 192 KiB, bound 192 KiB: within" in capsys.readouterr().out
    bounded, unbounded = json.loads((tmp_path / "results.json").read_text())["records"]
    for record in (bounded, unbounded):
        assert record["updates"] == 8
        assert max(held for _, held in record["curve"]) == record["counted"], "the coordinator counts what is held"
        assert record["curve"][-1][1] == 0, "nothing is left behind"
    assert unbounded["counted"] > 192 * 2**10
    assert (tmp_path / "buffer_bytes.png").stat().st_size > 0


def test_a_bound_that_no_update_fits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SMALL, "--max-bytes", "127KiB", "--out", str(tmp_path)]) == 2
    assert "the 8 samples of an update are held together, by the profile 128 KiB: expected at least 131072" in " ".join(
        capsys.readouterr().out.split()
    )
