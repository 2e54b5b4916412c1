"""Tests runs with a Ray of their own: its loss, a driver that ends silently, two nodes and the loss of one, a store
that is too small."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from benchmarks.local_ray import local_ray
from omni_async.performance.profile import Payload
from omni_async.preflight.check import preflight
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.on_ray.local import environment
from omni_async.tracking.rundir import RunDirectory
from omni_async.worker import Worker
from tests.e2e.emulation import write_recipe
from tests.e2e.runs import started
from tests.faults.disturbed import Disturbed, profile
from tests.runtime.on_ray.ray_roles import Echo
from tests.runtime.runtime_world import write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def server(name: str) -> psutil.Process:
    """Finds a server of the Ray that this process has started."""
    (found,) = (child for child in psutil.Process().children(recursive=True) if child.name() == name)
    return found


def test_a_run_goes_on_with_another_ray_and_says_so_when_it_may_not_have_one_more(tmp_path: Path) -> None:
    """Kills the first Ray's global store and the second one's node daemon."""

    def disturb(run: Disturbed) -> None:
        run.updated(4)
        server("gcs_server").kill()
        run.wait_for(lambda: len(run.faults) == 1)
        run.updated(run.console.updates[-1]["update"] + 1)
        server("raylet").kill()

    run = Disturbed(tmp_path, profile("train", 0.05), run={"restarts": 1})
    summary = run.run(disturb)
    assert [fault.reason for fault in run.faults] == ["Ray is gone: its gcs_server ended"]
    assert "again from update" in run.faults[0].replacement
    assert summary.status == "failed" and summary.reason is not None
    assert "Ray is gone: its raylet ended" in summary.reason and "as often as run.restarts allows" in summary.reason
    assert json.loads((run.job.run / "summary.json").read_text())["status"] == "failed"
    assert not (run.job.run / "control.sock").exists()
    assert list((run.job.run / "checkpoints").glob("update-*")), "there is something to go on from"
    assert not [child for child in psutil.Process().children(recursive=True) if "ray" in child.name()]


def test_a_driver_that_is_killed_leaves_no_process_and_one_that_is_terminated_while_ray_starts_ends_in_order(
    tmp_path: Path,
) -> None:
    """Sends the signal to the whole process group, as `timeout`, SLURM and systemd do."""
    recipe = write_recipe(tmp_path, profile("train", 0.05))
    settings = ["run.runtime=ray", "trainer.updates=100000", "checkpoint.every=1", "checkpoint.resume=auto"]
    left = signal_group(signal.SIGKILL, "update 2/", recipe, *settings)
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert len(gone) > 5 and not alive, [process.name() for process in alive]

    left = signal_group(signal.SIGTERM, "starting Ray", recipe, *settings)
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive, [process.name() for process in alive]
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "control.sock").exists()
    assert (run / "checkpoints").exists()


def signal_group(number: int, beginning: str, recipe: Path, *settings: str) -> list[psutil.Process]:
    """Trains until a line begins so, and signals the process group. Returns the processes that ran then."""
    with started(beginning, recipe, *settings) as job:
        running = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, number)
        rest = job.communicate(timeout=30)[0]
        assert job.returncode == (130 if number == signal.SIGTERM else -number), rest
        return running


@pytest.mark.thorough
def test_an_object_store_that_is_too_small_spills_and_the_run_goes_on(tmp_path: Path) -> None:
    """Keeps more alive than fits: 32 samples of 6 MB, for a store of 80 MB."""

    def disturb(run: Disturbed) -> None:
        run.updated(6)
        run.stop()

    made = profile("score", 0.2, Payload(trajectory=6_000_000, media=100_000, weights=1_000))
    rollout = {"workers": 1, "max_inflight": 32, "max_batch": 32}
    with local_ray(4, 80_000_000):
        run = Disturbed(tmp_path, made, rollout=rollout, reward={"workers": 1, "batch": 1})
        run.require_whole(run.run(disturb))


PORT_RANGES = {"127.0.0.2": (21000, 21999), "127.0.0.3": (22000, 22999)}


@contextlib.contextmanager
def node(address: str, folder: Path, head: str | None = None) -> Iterator[psutil.Process]:
    """Starts a Ray node of this machine with an address of its own, as it would be started by hand. With `head` it
    joins that one."""
    low, high = PORT_RANGES[address]
    role = (
        ["--address", head]
        if head
        else ["--head", "--port=6411", "--include-dashboard=false", "--temp-dir", str(folder)]
    )
    ports = [f"--min-worker-port={low}", f"--max-worker-port={high}", "--object-store-memory=100000000"]
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        *role,
        "--node-ip-address",
        address,
        "--num-cpus=4",
        *ports,
    ]
    started = subprocess.Popen(
        [*command, "--disable-usage-stats", "--block"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
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
            for process in [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]:
                process.kill()
        started.wait()


def nodes_of_ranks(folder: Path, address: str) -> list[str]:
    """Places two sequence groups of two ranks on the cluster and returns each rank's node."""
    config = write_world(
        folder,
        run={"runtime": "ray", "ray_address": address},
        rollout={"group_size": 4},
        trainer={"workers": 4, "sequence_parallel": 2},
        placement={"trainer": {"cpus": 1.25}, "rollout": {"cpus": 0.1}, "reward": {"cpus": 0.1}},
    )
    cluster = RayCluster(preflight(config), RunDirectory(folder / "run-1"))
    ranks = [Worker("trainer"), *(Worker("trainer", rank) for rank in range(1, 4))]

    async def main() -> list[str]:
        await cluster.connect()
        try:
            await cluster._reserve()
            for rank in ranks:
                await cluster._host(rank, Echo).phase("here")
                await cluster._locate(str(rank))
            return [cluster.parts()[str(rank)]["node"] for rank in ranks]
        finally:
            await cluster.close()

    return asyncio.run(main())


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_the_ranks_of_a_sequence_group_are_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each of two nodes room for three ranks, and the run two groups of two: packed by ranks, a group would be
    torn. The run is in a process of its own, which has known no other Ray and may end with this one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short,
        node("127.0.0.2", Path(short)),
        node("127.0.0.3", Path(short), "127.0.0.2:6411"),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        first, second, third, fourth = pool.submit(nodes_of_ranks, tmp_path, "127.0.0.2:6411").result(150)
    assert first == second != third == fourth


@pytest.mark.thorough
def test_a_cluster_of_two_nodes_is_joined_with_its_token_and_the_loss_of_the_second_node_and_of_the_head_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses the second node with everything that Ray put there, and the run goes on; the loss of the head ends it in
    order."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    address = "127.0.0.2:6411"
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short,
        node("127.0.0.2", Path(short)) as head,
        node("127.0.0.3", Path(short), address) as second,
    ):

        def disturb(run: Disturbed) -> None:
            run.updated(2)
            nodes = {where["node"] for where in run.parts().values()}
            (lost,) = {one["NodeID"] for one in ray.nodes() if one["NodeManagerAddress"] == "127.0.0.3"}
            assert lost in nodes, "Ray put nothing on the second node"
            for process in [*second.children(recursive=True), second]:
                process.kill()
            run.wait_for(lambda: bool(run.faults), 90)
            run.wait_for(lambda: all(where["node"] != lost for where in run.parts().values()), 90)
            run.updated(run.console.updates[-1]["update"] + 2)
            for process in [*head.children(recursive=True), head]:
                process.kill()

        own = {"ray_address": address, "restarts": 3}
        run = Disturbed(tmp_path, profile("generate", 0.05), rollout={"workers": 4}, reward={"workers": 3}, run=own)
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


@pytest.mark.slow
def test_references_that_are_dropped_while_ray_leaves_do_not_end_the_process() -> None:
    """An event loop goes on while its connection is closed in a thread; Ray's own client would exit at the first
    reference dropped after its core worker is gone."""
    done = subprocess.run([sys.executable, "-c", DROPPED_WHILE_RAY_LEAVES], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
