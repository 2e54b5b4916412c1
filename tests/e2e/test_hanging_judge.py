"""Tests that Ctrl-C ends a run whose rollout program's judge does not return."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omni_async_pipelines.qwen_image_edit import tiny

from tests.support.job_world import ENVIRONMENT
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

RECIPE = ROOT / "recipes/tiny/qwen_image_refine.yaml"
_STARTING_S = 240.0  # of a process that imports torch and loads a model, on a busy machine
_JUDGE = """\
import pathlib, time
class Judge:
    name, accepts = "judge", ("image",)
    def score(self, media, prompts):
        pathlib.Path("asked").touch()
        time.sleep(1e6)
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_whose_judge_hangs(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(_JUDGE)
    command = [
        *(sys.executable, "-m", "omni_async.cli", "train", str(RECIPE), f"model.path={tiny.build(tmp_path / 'model')}"),
        *("run.runtime=inprocess", "rollout.engine=emulated", f"run.dir={tmp_path / 'runs'}", "reward.probe=false"),
        "rollout.program.settings.judge={name: 'hanging:Judge'}",
    ]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        began = time.monotonic()
        while not (tmp_path / "asked").exists():
            said = (tmp_path / "output").read_text()
            assert process.poll() is None and time.monotonic() - began < _STARTING_S, said
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, (tmp_path / "output").read_text()
    finally:
        process.kill()
        process.wait()
