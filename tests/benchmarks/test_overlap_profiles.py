"""Tests the overlap of all shipped profiles in one table: of runs that take no time, and what the command refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overlap_profiles
from omni_async.bench.comparison import compare
from omni_async.bench.overlap import run_overlap
from omni_async.bench.result import Overlap
from tests.bench import overlap_world as world


def found(folder: Path, train: world.FakeTrain) -> Overlap:
    recipe = world.write_recipe(folder)
    return run_overlap(
        recipe,
        out=folder / "out",
        repeats=3,
        steps=6,
        arms=("sync", "async:2"),
        train=train,
        simulator=world.half_the_profile,
    )


def test_a_row_has_the_numbers_of_the_benchmark_of_one_recipe(tmp_path: Path) -> None:
    overlap = found(tmp_path, world.FakeTrain({"async-2": 5.0}))
    summaries = compare(overlap)
    before, after = summaries["sync"], summaries["async:2"]
    assert before.law_s and after.law_s
    heading, _, row = overlap_profiles.markdown({"toy": overlap}).splitlines()
    cells = dict(zip(heading.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert cells["profile"] == "toy"
    assert float(cells["sync: law s"]) == pytest.approx(before.law_s, rel=0.01)
    assert float(cells["of the law"]) == pytest.approx(before.law_s / world.SYNC_STEP, abs=0.001)
    assert float(cells["bound fraction"]) == pytest.approx(after.law_s / 5.0, abs=0.001)
    measured, law = world.SYNC_STEP / 5.0, before.law_s / after.law_s
    assert float(cells["measured (quartiles)"].split()[0]) == pytest.approx(measured, rel=0.01)
    assert float(cells["of the law's"]) == pytest.approx(measured / law, rel=0.01)


def test_a_recipe_without_a_finished_run_of_both_arms_has_no_row(tmp_path: Path) -> None:
    failing = world.FakeTrain(ends=lambda arm, number: ("failed", "out of memory") if arm == "sync" else None)
    assert len(overlap_profiles.markdown({"toy": found(tmp_path, failing)}).splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no emulated recipe is called 'nowhere'; there are qwen_image_full_h100_64,"),
        (["--steps", "0"], "expected at least 1"),
    ],
)
def test_wrong_arguments_start_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        overlap_profiles.main([*arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
