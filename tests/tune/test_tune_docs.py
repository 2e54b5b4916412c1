"""Checks that docs/tuning.md describes the code, and that every printed example of `tune` and `simulate` does what it
says when it is typed as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from benchmarks.tuning_plots import staleness
from omni_async import cli
from omni_async.config import load
from omni_async.config.describe import annotation_at
from omni_async.config.schedule import SCHEDULES
from omni_async.config.schema import Config
from omni_async.performance.law import async_step
from omni_async.performance.profile import write_profile
from omni_async.simulation import simulate as simulator
from omni_async.simulation.result import times_of
from tests.tune.tune_world import PROFILE, RECIPE, simulate_by_law

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "tuning.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in table
        if not re.fullmatch(r"[|\-: ]+", line)
    ]


def test_the_table_of_schedules_is_the_codes():
    (_, *names), *lines = rows("Schedules")
    assert names == list(SCHEDULES)
    documented = {
        name: {
            line[0]: yaml.safe_load(f'"{cell}"' if cell in ("on", "off") else cell)
            for line, cell in zip(lines, column, strict=True)
            if cell != "–"
        }
        for name, column in zip(names, zip(*(line[1:] for line in lines), strict=True), strict=True)
    }
    assert documented == SCHEDULES


def test_every_key_the_page_names_exists():
    keys = set(re.findall(rf"`((?:{'|'.join(Config.__struct_fields__)})\.[a-z_.]+)[`=]", PAGE))
    assert len(keys) > 15
    for key in keys:
        annotation_at(Config, key.split("."))


def test_every_command_link_and_figure_of_the_page_is_there():
    parser = cli._parser()
    commands = re.findall(r"^omni-async (.*?)(?:\s+#.*)?$", PAGE, flags=re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        parser.parse_args(command.replace("N", "4").split())
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert targets
    for target in targets:
        assert (DOCS / target).is_file(), target


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_profile(tmp_path / "steady.json", PROFILE)
    (tmp_path / "recipe.yaml").write_text(RECIPE + "emulation: {profile: steady.json}\n")
    return tmp_path / "recipe.yaml"


def test_the_figures_show_the_law_the_simulations_and_every_schedule(recipe):
    config = load(recipe, ["schedule=async"])
    said: list[str] = []
    steps, ages = staleness(recipe, config, PROFILE, said.append).axes
    lines = {line.get_label(): line for line in steps.get_lines()}
    law = [async_step(times_of(load(recipe, [f"staleness.max_updates={s}"]), PROFILE), s) for s in range(5)]
    assert list(lines["law"].get_ydata()) == pytest.approx(law)
    assert list(lines["simulated"].get_ydata()) == pytest.approx(law, rel=0.1)
    assert {text.get_text() for text in steps.texts} == set(SCHEDULES) - {"async"}
    assert all(age <= s for line in ages.get_lines() for s, age in zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert len(said) == 5 + 4


PAGES = ["README.md", "docs/*.md", "recipes/*/README.md", "omni_async/*/command.py"]
_EXAMPLE = re.compile(r"^\s*\$?\s*(?:\.venv/bin/)?omni-async ((?:tune|simulate) \S+\.yaml(?:.*\\\n)*.*)$", re.MULTILINE)


def printed() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = (match.group(1).replace("\\\n", " ") for text in texts for match in _EXAMPLE.finditer(text))
    return list(dict.fromkeys(" ".join(shlex.split(command, comments=True)) for command in found))


@pytest.mark.parametrize("command", printed())
def test_a_printed_example_works_as_it_stands(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    write_profile(tmp_path / "runs" / "my-run" / "profile.json", PROFILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulator, "simulate", simulate_by_law)
    assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
    if command.startswith("tune"):
        assert "\nwrote " in capsys.readouterr().out


def test_there_are_examples():
    commands = printed()
    assert sum(command.startswith("tune") for command in commands) >= 3
    assert sum(command.startswith("simulate") for command in commands) >= 4
    assert any("--devices 2" in command and "quickstart" in command for command in commands)
