"""Tests runs with a Ray of their own: its loss, two nodes and the loss of one, a store that is too small; and the ranks
of a real model, of which one is killed in every layout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from omni_async.performance.profile import Payload
from omni_async.records.write.summary import read_summary
from omni_async.runtime.on_ray.local import environment
from tests.support.job_world import Disturbed, slow_at
from tests.support.killed_job import problems
from tests.support.local_ray import local_ray
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow


def server(name: str) -> psutil.Process:
    """Finds a server of the Ray that this process has started."""
    (found,) = (child for child in psutil.Process().children(recursive=True) if child.name() == name)
    return found


@pytest.mark.thorough
def test_rays_are_lost_until_there_may_be_no_more(tmp_path):
    """Kills the first Ray's global store and the second one's node daemon."""

    def disturb(run: Disturbed) -> None:
        run.updated(4)
        server("gcs_server").kill()
        run.wait_for(lambda: len(run.faults) == 1)
        run.updated(run.last_update + 1)
        server("raylet").kill()

    run = Disturbed.emulated(tmp_path, slow_at("train", 0.05), run={"restarts": 1})
    summary = run.run(disturb)
    assert [fault.reason for fault in run.faults] == ["Ray is gone: its gcs_server ended"]
    assert "again from update" in run.faults[0].replacement
    assert summary.status == "failed" and summary.reason is not None
    assert "Ray is gone: its raylet ended" in summary.reason and "as often as run.restarts allows" in summary.reason
    assert read_summary(run.job.run / "summary.json").status == "failed"
    assert not (run.job.run / "control.sock").exists()
    assert list((run.job.run / "checkpoints").glob("update-*")), "there is something to go on from"
    assert not [child for child in psutil.Process().children(recursive=True) if "ray" in child.name()]


@pytest.mark.thorough
def test_an_object_store_that_is_too_small_spills(tmp_path):
    """Keeps more alive than fits: 32 samples of 6 MB, for a store of 80 MB."""

    def disturb(run: Disturbed) -> None:
        run.updated(6)
        run.stop()

    made = slow_at("score", 0.2, Payload(trajectory=6_000_000, media=100_000, weights=1_000))
    rollout = {"workers": 1, "max_inflight": 32, "max_batch": 32}
    with local_ray(4, 80_000_000):
        run = Disturbed.emulated(tmp_path, made, rollout=rollout, reward={"workers": 1, "batch": 1})
        run.require_whole(run.run(disturb))


# Addresses and ports follow from the number of the process: two suites on one machine do not meet.
NETWORK = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250 + 1}"
# Ray itself takes 10001.
FIRST_PORT = 11_000 + os.getpid() % 10 * 2_000
HEAD_ADDRESS, SECOND_ADDRESS = f"{NETWORK}.2", f"{NETWORK}.3"
HEAD = f"{HEAD_ADDRESS}:{FIRST_PORT}"
# Workers listen at every address: the two nodes need ranges that do not overlap.
PORT_RANGES = {
    HEAD_ADDRESS: (FIRST_PORT + 1, FIRST_PORT + 999),
    SECOND_ADDRESS: (FIRST_PORT + 1_000, FIRST_PORT + 1_999),
}


@contextlib.contextmanager
def node(address: str, folder: Path, head: str | None = None) -> Iterator[psutil.Process]:
    """Starts a Ray node of this machine with an address of its own, as it would be started by hand. With `head` it
    joins that one."""
    low, high = PORT_RANGES[address]
    of_head = ["--head", f"--port={FIRST_PORT}", "--include-dashboard=false", "--temp-dir", str(folder)]
    command = [str(Path(sys.executable).with_name("ray")), "start", *(["--address", head] if head else of_head)]
    command += ["--node-ip-address", address, "--num-cpus=4", "--disable-usage-stats", "--block"]
    command += [f"--min-worker-port={low}", f"--max-worker-port={high}", "--object-store-memory=100000000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen(command, **pipes, env=environment(), start_new_session=True)
    try:
        assert started.stdout is not None
        said = []
        for line in started.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        assert said and "Ray runtime started" in said[-1], "".join(said)
        threading.Thread(target=started.stdout.read, daemon=True).start()
        yield psutil.Process(started.pid)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            kill(psutil.Process(started.pid))
        started.wait()


def kill(process: psutil.Process) -> None:
    """Kills a process with all that it has started."""
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end with the others
            one.kill()


@pytest.mark.thorough
def test_two_nodes_are_lost(tmp_path, monkeypatch):
    """They ask for a token. After the loss of the second, with Ray's workers there, the run continues."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)

    def disturb(run: Disturbed) -> None:
        run.updated(2)
        nodes = {where["node"] for where in run.parts().values()}
        (lost,) = {one["NodeID"] for one in ray.nodes() if one["NodeManagerAddress"] == SECOND_ADDRESS}
        assert lost in nodes, "Ray put nothing on the second node"
        kill(second)
        run.wait_for(lambda: bool(run.faults), 2 * PATIENCE)
        run.wait_for(lambda: all(where["node"] != lost for where in run.parts().values()), 2 * PATIENCE)
        run.updated(run.last_update + 2)
        kill(head)

    own = {"ray_address": HEAD, "restarts": 3}
    made = slow_at("generate", 0.05)
    run = Disturbed.emulated(tmp_path, made, rollout={"workers": 4}, reward={"workers": 3}, run=own)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short,
        node(HEAD_ADDRESS, Path(short)) as head,
        node(SECOND_ADDRESS, Path(short), HEAD) as second,
    ):
        summary = run.run(disturb, 180)
    assert summary.status == "failed" and summary.faults
    assert not ray.is_initialized()
    assert not (run.job.run / "control.sock").exists()


DROPPED_WHILE_RAY_LEAVES = """
import threading, time
import ray
from omni_async.runtime.on_ray.connection import connect

connection = connect(None, 1)
references = [ray.put(number) for number in range(15_000)]
leaving = threading.Thread(target=connection.close)
leaving.start()
while leaving.is_alive() and references:
    references.pop()
    time.sleep(1e-4)
leaving.join()
assert references, "all were dropped before Ray had left"
print("went on")
"""


@pytest.mark.thorough
def test_references_dropped_while_ray_leaves():
    """Ray's own client would exit at the first reference dropped after its core worker is gone."""
    done = subprocess.run([sys.executable, "-c", DROPPED_WHILE_RAY_LEAVES], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


# ---- ranks of a real model -------------------------------------------------------------------------------------------

LAYOUTS = {
    "two ranks": ("trainer.workers=2",),
    "a sequence over two ranks": ("trainer.workers=2", "trainer.sequence_parallel=2"),
    "two copies of two ranks": ("trainer.workers=4", "trainer.shard=2", "trainer.offload=true"),
    "one rank": ("trainer.workers=1",),
}
_UPDATES = 9


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_layout_continues_another_after_a_kill(recipe):
    settings = ("run.runtime=ray", "run.health_timeout_s=20", "staleness.max_updates=2", "checkpoint.every=2")
    before, updates = "null", 0
    for layout, keys in LAYOUTS.items():
        begun, updates = updates, updates + _UPDATES
        goal = ("trainer.optimizer.lr=0.1", f"trainer.updates={updates}", f"checkpoint.resume={before}")
        run = Disturbed(recipe, *settings, *keys, *goal)

        def kill_a_rank(run: Disturbed, begun: int = begun) -> None:
            run.updated(begun + 3, 180)
            run.signal("trainer-1", signal.SIGKILL)

        kills = layout != "one rank"
        summary = run.run(kill_a_rank if kills else lambda _: None, 200)
        assert (summary.status, summary.updates) == ("done", updates), (layout, summary.reason)
        assert problems(run.job) == [], layout
        if kills:
            fault = run.faults[-1]
            assert "trainer" in fault.part and "again from update" in fault.replacement, layout
        before = str(run.job.run)
    assert len(run.faults) == len(LAYOUTS) - 1
