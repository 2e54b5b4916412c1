"""Tests the table of simulated recipes: its numbers are the simulator's, and it misses no target the documentation
claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overlap_simulated
from omni_async.config import load
from omni_async.performance.law import smallest_useful_budget
from omni_async.performance.profile import load_profile
from omni_async.simulation.result import times_of
from omni_async.simulation.simulate import simulate

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


@pytest.mark.parametrize(
    ("arguments", "said"), [(["nowhere"], "no emulated recipe is called 'nowhere'"), (["--seeds", "0"], "at least 1")]
)
def test_wrong_arguments_simulate_nothing(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        overlap_simulated.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


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
