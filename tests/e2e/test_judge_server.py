"""Tests a run that a judge scores: a real vLLM server on the CPU with a random model, which is killed in mid-run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests import tiny_judge
from tests.job_world import Disturbed


def servers() -> list[int]:
    """Returns the processes of vLLM servers that this one has started."""
    mine = psutil.Process().children(recursive=True)
    return [one.pid for one in mine if "omni_async.reward_server.vllm_process" in one.cmdline()]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_run_judged_by_a_vllm_server_that_is_killed_goes_on_with_another(recipe: Path, tmp_path: Path) -> None:
    model = tiny_judge.build(tmp_path / "judge")
    arguments = "[--dtype, bfloat16, --max-model-len, '1024', --max-num-seqs, '8', --enforce-eager]"
    job = Disturbed(
        recipe,
        f"reward.servers=[{{name: judge, model: '{model}', resources: {{cpus: 0.5}}, args: {arguments}}}]",
        "reward.scorers=[{name: vlm_judge, params: {server: judge, model: judge, prompt: '{prompt}? Answer with yes or"
        " no.'}}]",
        "run.startup_timeout_s=200",
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
    assert (job.job.run / "servers" / "judge-0.log").stat().st_size > 0
