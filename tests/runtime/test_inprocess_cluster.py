"""Tests the start of roles that share a process, and the logs of their failures."""

from __future__ import annotations

import dataclasses

import pytest

from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime import inprocess
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.inprocess import InProcessCluster
from omni_async.runtime.preflight.check import preflight
from tests.runtime.runtime_world import write_world
from tests.support.job_world import PROFILE


@pytest.mark.parametrize("emulated", [False, True])
async def test_each_worker_is_named_before_it_loads(tmp_path, monkeypatch, emulated):
    """Emulated devices load nothing."""
    told: list[str] = []

    class Quick:
        async def start(self) -> None:
            told.append("started")

    monkeypatch.setattr(inprocess, "load_named", lambda name: lambda context: Quick())
    inputs = dataclasses.replace(preflight(write_world(tmp_path)), profile=PROFILE if emulated else None)
    cluster = InProcessCluster(inputs, RunDirectory(tmp_path))
    cluster.tell = told.append
    await cluster.start()
    reward, trainer = "reward-0: loading its scorers", "trainer: loading its model"
    rollout = "rollout-0: loading its model; it gets work once it holds the newest weights"
    loading = [reward, "started", trainer, "started", rollout, "started"]
    assert told == (["started"] * 3 if emulated else loading)


async def test_the_traceback_of_a_failure_is_in_the_workers_log_alone(tmp_path, monkeypatch, capsys):
    class Broken:
        async def start(self) -> None:
            raise KeyError("layers.0")

        async def run(self) -> None:
            raise PeerLost("trainer is gone")

    monkeypatch.setattr(inprocess, "load_named", lambda name: lambda context: Broken())
    cluster = InProcessCluster(preflight(write_world(tmp_path)), RunDirectory(tmp_path / "run"))
    with pytest.raises(KeyError):
        await cluster._ready("rollout-0", Broken())
    with pytest.raises(PeerLost):
        await cluster._run_worker("reward-0")
    [log] = (tmp_path / "run" / "logs").iterdir()
    lines = log.read_text().splitlines()
    assert (log.name, lines[0], lines[-1]) == (
        "rollout-0.log",
        "Traceback (most recent call last):",
        "KeyError: 'layers.0'",
    )
    assert "Traceback" not in "".join(capsys.readouterr())
