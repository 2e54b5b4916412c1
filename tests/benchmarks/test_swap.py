"""Tests the benchmark of swaps at its smallest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import swap


@pytest.mark.thorough
def test_full_weights_are_copied_once_and_the_base_is_opened_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swap.main(["--mb", "40", "--ranks", "3", "--repeats", "2", "--out", str(tmp_path)]) == 0
    arms = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=swap.Results).arms
    copied = {arm.way: arm.copied for arm in arms if arm.part == "full weights"}
    assert copied == {"plain copy": 1.0, "joined first": 2.0, "into place": 1.0}
    opened = {arm.way: arm.opened for arm in arms if arm.part == "base of adapters"}
    assert opened == {"opened again": 1, "stays open": 0}
    assert "joined first" in capsys.readouterr().out
