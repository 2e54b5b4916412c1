"""Tests a run that a judge scores: a real vLLM server on the CPU with a random model, which is killed in mid-run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from omni_async.cli import main
from tests.support import tiny_judge
from tests.support.job_world import Disturbed


def servers() -> list[int]:
    """Returns the processes of vLLM servers that this one has started."""
    mine = psutil.Process().children(recursive=True)
    return [one.pid for one in mine if "omni_async.roles.vllm_process" in one.cmdline()]


def judged(folder: Path) -> list[str]:
    """Returns the overrides that have a random judge score, and its server started; builds it in the folder."""
    model = tiny_judge.build(folder / "judge")
    arguments = "[--dtype, bfloat16, --max-model-len, '1024', --max-num-seqs, '8', --enforce-eager]"
    question = "{prompt}? Answer with yes or no."
    return [
        f"reward.servers=[{{name: judge, model: '{model}', resources: {{cpus: 0.5}}, args: {arguments}}}]",
        f"reward.scorers=[{{name: vlm_judge, params: {{server: judge, model: judge, prompt: '{question}'}}}}]",
        "run.startup_timeout_s=200",
    ]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_a_run_judged_by_a_vllm_server_that_is_killed_goes_on_with_another(recipe: Path, tmp_path: Path) -> None:
    job = Disturbed(
        recipe,
        *judged(tmp_path),
        "trainer.updates=10000",
        "staleness.max_updates=1",
        "algorithm.advantage.drop_zero_variance=false",
    )

    def disturb(job: Disturbed) -> None:
        job.updated(2, 240)
        (before,) = servers()
        os.kill(before, signal.SIGKILL)
        job.wait_for(lambda: len(job.faults) == 1, 200)
        job.wait_for(lambda: any("judge-0.2: ready at" in text for text in job.console.phases), 200)
        assert servers() and before not in servers()
        job.stop()

    job.require_whole(job.run(disturb))
    assert [fault.part for fault in job.faults] == ["judge-0"]
    assert "vLLM ended with -9" in job.faults[0].reason
    assert not servers(), "they end with the run"
    told = "\n".join(job.console.phases + job.console.notes)
    assert "judge-0: ready at http://***@" in told
    rewards = [line["reward"] for line in job.ledger() if line["event"] == "trained"]
    assert rewards and all(0 <= reward <= 1 for reward in rewards) and len({round(r, 6) for r in rewards}) > 1
    assert (job.job.run / "logs" / "judge-0.log").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_score_starts_the_judge_that_a_recipe_names_and_ends_it(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for i in range(4):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)).save(images / f"{i}.png")
        (images / f"{i}.txt").write_text(f"image {i}")
    table = tmp_path / "scores.json"
    assert main(["score", str(recipe), str(images), *judged(tmp_path), "--json", str(table)]) == 0
    values = [row["reward"] for row in json.loads(table.read_text())["rows"]]
    assert len(values) == 4 and all(0 <= value <= 1 for value in values) and len({*values}) > 1
    assert "judge-0: vLLM loads" in capfd.readouterr().err
    assert not servers()
