"""Checks that every example of `tune` and `simulate` that is printed anywhere does what it says when it is typed as
it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from omni_async import cli
from omni_async.performance.profile import write_profile
from omni_async.simulation import simulate as simulator
from tests.tune.tune_world import PROFILE, RECIPE, simulate_by_law

ROOT = Path(__file__).parents[2]
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
