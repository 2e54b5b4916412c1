"""Runs every test-size recipe as its own header says: the checkpoint is built, then trained asynchronously on Ray and
vLLM-Omni."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, check_every_group_ended_once, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny"
_PROGRAMS = {"python": [sys.executable], "omni-async": [sys.executable, "-m", "omni_async.cli"]}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_commands_in_the_header_train_every_group_once_within_the_budget(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RECIPES, tmp_path / "recipes" / "tiny")
    monkeypatch.chdir(tmp_path)  # where run.dir is
    for command in re.findall(r"^#   (.+)$", recipe.read_text(encoding="utf-8"), flags=re.M):
        program, *arguments = shlex.split(command)
        done = subprocess.run(
            [*_PROGRAMS[program], *arguments], capture_output=True, text=True, timeout=280, env=ENVIRONMENT
        )
        assert (done.returncode, done.stderr) == (0, ""), done

    run = left_behind(tmp_path / "recipes" / "tiny" / recipe.name, [])
    check_every_group_ended_once(run)
    assert run.config.staleness.max_updates == 2 and run.config.trainer.updates == 5
    assert run.summary.updates == 5 and 0 < run.summary.staleness_max <= 2
    assert run.summary.counters.rejected == 0, "the reward has a signal"
    assert run.summary.overlap_fraction > 0
    assert all(line["grad_norm"] > 0 for line in run.metrics)
    # A sample's log-prob is recomputed by the policy that drew it in the first update, so only rounding is between.
    assert run.metrics[0]["log_ratio_nats/absmax"] < 1e-2
