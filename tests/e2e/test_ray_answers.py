"""Tests a run of answers as a user starts it: Ray actors, vLLM in child processes, a killed engine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.job_world import left_behind, started

READ_DIGITS = Path(__file__).parents[2] / "recipes/quickstart/read_digits/read_digits.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(600)]


def test_answers_of_vllm_are_trained_once_although_it_is_killed(tmp_path: Path) -> None:
    overrides = (
        *("run.runtime=ray", "rollout.engine=vllm", f"run.dir={tmp_path}", "tracking.mlflow.enabled=false"),
        *("trainer.updates=6", "trainer.groups_per_update=4", "validation.samples_per_prompt=1"),
    )
    with started("update 2/", READ_DIGITS, *overrides) as driver:
        children = psutil.Process(driver.pid).children(recursive=True)
        [core] = [child for child in children if child.cmdline()[:1] == ["VLLM::EngineCore"]]
        below = core.children(recursive=True)
        core.kill()
        output, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, output
    assert "rollout-0 was lost (EngineError: rollout-0: " in output and "rollout-0.2 is at work in place of" in output
    assert not any(child.is_running() for child in below)

    made = left_behind(READ_DIGITS, overrides).check_every_group_ended_once()
    assert made.summary.updates == 6
    assert 0 < made.summary.staleness_max <= 2
    assert made.metrics[0]["engine_mismatch_nats"] < 1e-4, "vLLM and trainer compute the same"
