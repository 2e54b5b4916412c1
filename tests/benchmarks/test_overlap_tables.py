"""Tests the tables of overlap, of simulated recipes and of all shipped profiles, against what was found and claimed."""

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
from omni_async.simulation.simulate import simulate
from tests.commands.bench import overlap_world as world

RECIPES = sorted(overlap_simulated.EMULATED.glob("*.yaml"))


def test_a_row_holds_what_the_simulator_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap_simulated.main(["qwen_image_full_h100_64", "--seeds", "1"]) == 0
    heading, _, row = capsys.readouterr().out.splitlines()
    cells = row.strip("| ").split(" | ")
    assert len(cells) == len(heading.strip("| ").split(" | "))
    config = load(RECIPES[0].parent / "qwen_image_full_h100_64.yaml", ["staleness.max_updates=2"])
    assert config.emulation is not None
    found = simulate(config, load_profile(config.emulation.profile), updates=200)
    assert float(cells[-4]) == pytest.approx(found.law_s, rel=1e-3)
    assert float(cells[-3].split()[0]) == pytest.approx(found.step_s, rel=1e-3)
    assert float(cells[-2].split()[0]) == pytest.approx(found.bound_fraction, abs=1e-3)
    assert found.bound_fraction >= 0.95


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_readme_names_the_laws_smallest_useful_budget(recipe: Path) -> None:
    config = load(recipe, ["staleness.max_updates=2"])
    assert config.emulation is not None
    profile = load_profile(config.emulation.profile)
    times = times_of(config, profile)
    (line,) = [line for line in (recipe.parent / "README.md").read_text().splitlines() if f"({recipe.name})" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert float(cells[3]) == pytest.approx(times.bottleneck[1], rel=0.01)
    assert int(cells[4].split()[0]) == smallest_useful_budget(times)


def found(folder: Path, train: world.FakeTrain) -> Overlap:
    given = {"repeats": 3, "steps": 6, "arms": ("sync", "async:2"), "simulator": world.half_the_profile}
    return run_overlap(world.write_recipe(folder), out=folder / "out", train=train, **given)  # type: ignore[arg-type]


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
