"""How a run of the command line looks in trackers after each kind of end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_async.cli import main
from tests.support.job_world import (
    COMMAND,
    ENVIRONMENT,
    command_line,
    left_behind,
    run,
    signal_group,
    slow_at,
    write_emulated,
)
from tests.support.patience import PATIENCE
from tests.support.ports import unused_address

if TYPE_CHECKING:
    from mlflow.entities import Run

pytestmark = pytest.mark.slow


def tracked(folder: Path) -> list[Run]:
    """Returns all runs in the database."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("omni_async")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    """Returns the numbers in the event files, which have each version once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [run] = (path.parent for path in (folder / "runs").glob("*/tensorboard"))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(one.step, one.value) for one in events.Scalars(name)]


def test_a_killed_interrupted_and_finished_run_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: dict[str, Any] = {
        "trainer": {"updates": 40, "groups_per_update": 2},
        "checkpoint": {"every": 2, "resume": "auto"},
        "tracking": {"mlflow": {"enabled": True}, "tensorboard": {"enabled": True}},
    }
    recipe = write_emulated(tmp_path, slow_at("step", 0.2), **sections)
    signal_group(signal.SIGKILL, "update 5/", recipe)
    [first] = tracked(tmp_path)
    assert first.info.status == "RUNNING", "nobody was left to say otherwise"
    assert main(["status", str(next((tmp_path / "runs").glob("emulated-*")))]) == 0
    assert "it was killed" in capsys.readouterr().out
    signal_group(signal.SIGTERM, "update 9/", recipe)
    [interrupted] = tracked(tmp_path)
    assert (interrupted.info.run_id, interrupted.info.status) == (first.info.run_id, "KILLED")
    done = run(recipe, "emulation.time_scale=0.01")
    [ended] = tracked(tmp_path)
    assert (ended.info.run_id, ended.info.status) == (first.info.run_id, "FINISHED")
    assert done.path == left_behind(recipe).path and ended.info.run_name == done.path.name
    steps, rewards = zip(*points(tmp_path, "goal/reward"), strict=True)
    assert steps == tuple(range(1, 41))
    assert rewards == pytest.approx([line["reward"] for line in done.metrics], rel=1e-6)


@pytest.mark.thorough
def test_first_runs_at_once(tmp_path: Path) -> None:
    """Three runs that start together in a folder without runs make MLflow's database once."""
    recipe = write_emulated(tmp_path, trainer={"updates": 2}, tracking={"mlflow": {"enabled": True}})
    fast = ("emulation.time_scale=0.001",)
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [[*COMMAND, str(recipe), *fast, f"run.seed={seed}", f"run.name=seed{seed}"] for seed in range(3)]
    jobs = [subprocess.Popen(command, env=ENVIRONMENT, cwd="/", **piped) for command in commands]
    outputs = [job.communicate(timeout=4 * PATIENCE)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], outputs
    assert len(tracked(tmp_path)) == 3


@pytest.mark.thorough
def test_tracker_down_at_resume(tmp_path: Path) -> None:
    """The batch system starts a job again while MLflow's server is down: the job trains."""
    recipe = write_emulated(tmp_path, trainer={"updates": 2}, tracking={"mlflow": {"enabled": True}})
    first = run(recipe, "emulation.time_scale=0.001")
    more = ("emulation.time_scale=0.001", "trainer.updates=4", f"checkpoint.resume={first.path}")
    with unused_address() as address:
        answer = command_line(recipe, *more, f"tracking.mlflow.tracking_uri=http://{address}")
    assert answer.code == 0 and left_behind(recipe).summary.updates == 4, answer
    assert "the run resumes without it, and its writes wait" in answer.stderr
    assert "MLflow: it has no record of the run's end" in answer.stderr
