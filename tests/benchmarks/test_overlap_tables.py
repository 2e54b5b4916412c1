"""Tests the tables of overlap, of simulated recipes and of all shipped profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overlap_profiles, overlap_simulated
from omni_async.commands.bench.comparison import compare
from omni_async.commands.bench.overlap import run_overlap
from omni_async.commands.bench.result import Overlap
from omni_async.config import load
from omni_async.performance.law import smallest_useful_budget
from omni_async.performance.profile import load_profile
from omni_async.simulation.result import times_of
from tests.commands.bench import overlap_world as world

RECIPES = sorted(overlap_simulated.EMULATED.glob("*.yaml"))


@pytest.mark.thorough
def test_simulated_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap_simulated.main(["qwen_image_full_h100_64", "--seeds", "1"]) == 0
    heading, _, row = capsys.readouterr().out.splitlines()
    cells = row.strip("| ").split(" | ")
    assert len(cells) == len(heading.strip("| ").split(" | "))
    law, simulated, bound, _, eager, timely, throughput = (float(cell.split()[0]) for cell in cells[-7:])
    assert bound == pytest.approx(law / simulated, abs=2e-3) and bound >= 0.95
    assert timely < 0.25 * eager and throughput > 0.99, "groups that are admitted just in time are young"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_readme_has_smallest_useful_budget(recipe: Path) -> None:
    config = load(recipe, ["staleness.max_updates=2"])
    assert config.emulation is not None
    times = times_of(config, load_profile(config.emulation.profile))
    (line,) = [line for line in (recipe.parent / "README.md").read_text().splitlines() if f"({recipe.name})" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert float(cells[3]) == pytest.approx(times.bottleneck[1], rel=0.01)
    assert int(cells[4].split()[0]) == smallest_useful_budget(times)


def found(folder: Path, train: world.FakeTrain) -> Overlap:
    folder.mkdir()
    given = {"repeats": 3, "steps": 6, "arms": ("sync", "async:2"), "simulator": world.half_the_profile}
    return run_overlap(world.write_recipe(folder), out=folder / "out", train=train, **given)  # type: ignore[arg-type]


def test_measured_rows(tmp_path: Path) -> None:
    """Compares a row with the benchmark's own numbers; a recipe without finished runs of both arms has no row."""
    overlap = found(tmp_path / "done", world.FakeTrain({"async-2": 5.0}))
    failing = world.FakeTrain(ends=lambda arm, number: ("failed", "out of memory") if arm == "sync" else None)
    summaries = compare(overlap)
    before, after = summaries["sync"], summaries["async:2"]
    assert before.law_s and after.law_s
    failed = found(tmp_path / "failed", failing)
    heading, _, row = overlap_profiles.markdown({"toy": overlap, "failed": failed}).splitlines()
    cells = dict(zip(heading.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert cells["profile"] == "toy"
    measured, law = world.SYNC_STEP / 5.0, before.law_s / after.law_s
    expected = {
        "sync: law s": before.law_s,
        "of the law": before.law_s / world.SYNC_STEP,
        "bound fraction": after.law_s / 5.0,
        "measured (quartiles)": measured,
        "of the law's": measured / law,
    }
    for name, number in expected.items():
        assert float(cells[name].split()[0]) == pytest.approx(number, rel=0.01, abs=0.001), name
