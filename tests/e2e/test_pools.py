"""Tests whole runs whose scorers work in pools of their own: in one process, and on Ray where a pool is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.job_world import Disturbed, run

POOLED = (
    "reward.pools=[{name: readers, workers: 2, resources: {cpus: 0.1}}]",
    "reward.scorers=[{name: jpeg_size, weight: 0.1}, {name: 'tests.e2e.scorers:Brightness', pool: readers},"
    " {name: jpeg_size, pool: readers, weight: 0.0, params: {quality: 50}}]",
)


def test_scorers_of_a_pool_score_as_they_do_in_the_reward_workers(recipe: Path) -> None:
    pooled = run(recipe, *POOLED)
    alone = run(recipe, *POOLED[1:], "reward.scorers.1.pool=null", "reward.scorers.2.pool=null")
    for finished in (pooled, alone):
        assert finished.summary.status == "done", finished.summary.reason
        finished.check_every_group_ended_once()
    keys = [key for key in alone.metrics[0] if "/value" in key or key == "reward"]
    assert len(keys) >= 4
    assert [{key: one[key] for key in keys} for one in pooled.metrics] == [
        {key: one[key] for key in keys} for one in alone.metrics
    ]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_pool_on_ray_is_replaced_when_it_is_killed_and_every_group_ends_once(recipe: Path) -> None:
    def disturb(job: Disturbed) -> None:
        job.updated(1, 240)
        job.signal("readers-0", signal.SIGKILL)
        job.wait_for(lambda: len(job.faults) == 1)
        job.wait_for(lambda: "readers-0.2" in job.parts())
        job.updated(job.last_update + 2)
        assert "readers-2" in job.scale(readers=3)["addresses"]
        job.stop()

    job = Disturbed(recipe, *POOLED, "run.runtime=ray", "trainer.updates=10000", "staleness.max_updates=1")
    job.require_whole(job.run(disturb))
    assert [fault.part for fault in job.faults] == ["readers-0"]
    told = "\n".join(job.console.phases + job.console.notes)
    assert "readers-0.2: ready at http://***@127.0.0.1:" in told, "a local Ray has its roles on one machine"
