"""Tests the benchmarks of how engines draw, at the smallest size: every arm draws, and what they compare is so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import encoder_cache, lora_rollout


@pytest.mark.thorough
@pytest.mark.parametrize("family", list(lora_rollout._FAMILIES))
def test_merged_and_unmerged_adapters_draw_the_same_samples(family: str, tmp_path: Path) -> None:
    small = ["--width", "96", "--layers", "1", "--rank", "2", "--batch", "1", "--steps", "2", "--repeats", "1"]
    lora_rollout.main([family, *small, "--out", str(tmp_path)])
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=lora_rollout.Results)
    assert results.differences[family] < 1e-5
    assert [record.arm for record in results.records] == ["base", "merged", "unmerged"]


def test_an_engine_encodes_every_prompt_once(tmp_path: Path) -> None:
    small = [
        "--prompts",
        "4",
        "--epochs",
        "2",
        "--groups",
        "2",
        "--group-size",
        "2",
        "--validation",
        "2",
        "--every",
        "2",
    ]
    encoder_cache.main([*small, "--steps", "2", "--out", str(tmp_path)])
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=encoder_cache.Results)
    calls = {arm: [record.calls for record in results.records if record.arm == arm] for arm in encoder_cache.ARMS}
    assert list(calls.values()) == [[2, 2, 2, 0, 0, 0], [2, 2, 2, 2, 2, 2], [4, 2, 4, 4, 2, 4]]
