"""Tests starting a local Ray: how often it is tried, what is reported when it does not come up. Scripts of a few lines
stand for Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("ray")
from omni_async.config.ray_cluster import ClusterAddress
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.on_ray import cluster as ray_cluster
from omni_async.runtime.on_ray import connection as ray_connection
from omni_async.runtime.on_ray import head
from omni_async.runtime.on_ray import local as ray_local
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.on_ray.connection import Connection, StartError, connect
from omni_async.runtime.on_ray.local import LocalRay, StartFailed
from omni_async.runtime.preflight import devices
from omni_async.runtime.preflight.check import preflight
from tests.runtime.runtime_world import write_world
from tests.support.patience import PATIENCE, until, wait_for
from tests.support.ports import unused_address

TIMED_OUT = "The current node timed out during startup."


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rays").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "rays"))
    monkeypatch.setattr(ray_local, "_LONGEST_FOLDER", 1000)
    monkeypatch.setattr(ray_connection, "_PAUSE_S", 0.05)
    monkeypatch.setattr(ray_connection.ray, "is_initialized", lambda: False)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what a start sets is undone
        monkeypatch.delenv(name)


def instead(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Runs `script` where Ray would be started. Returns a file with a line for each start."""
    starts = folder / "starts"
    (folder / "fake.py").write_text(
        "import json, sys, time\nsys.stdout.reconfigure(line_buffering=True)\n"  # as Ray's own start flushes its lines
        f"print(file=open({str(starts)!r}, 'a'))\n{script}\n"
    )
    monkeypatch.setattr(ray_local, "head", SimpleNamespace(__file__=str(folder / "fake.py")))
    return starts


@pytest.fixture
def ten_seconds_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a clock that only a failed start moves, as a busy machine would starts of very different lengths."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def leave() -> None:
        clock.now += 10.0

    monkeypatch.setattr(ray_connection, "time", clock)
    monkeypatch.setattr(ray_connection, "_leave", leave)


@pytest.fixture
def no_process_stays() -> Iterator[None]:
    before = psutil.Process().children()
    yield
    assert [one for one in psutil.Process().children() if one not in before] == []


def test_a_start_that_timed_out_is_tried_again(tmp_path, monkeypatch, caplog, ten_seconds_a_try):
    starts = instead(monkeypatch, tmp_path, f"print(json.dumps({{'error': {TIMED_OUT!r}, 'final': False}}))")
    with pytest.raises(StartError) as failed:
        connect(None, 1, 25.0)
    assert len(starts.read_text().splitlines()) == 3
    text = str(failed.value)
    said = f"Ray did not start within run.startup_timeout_s = 25, tried 3 times: {TIMED_OUT}"
    assert text.startswith(said) and "\n" not in text
    assert "is the machine overloaded?" in text
    assert f"Ray did not start ({TIMED_OUT}); trying again" in caplog.text


def test_a_final_failure_is_not_tried_again(tmp_path, monkeypatch):
    starts = instead(monkeypatch, tmp_path, "print(json.dumps({'error': 'no room in /dev/shm', 'final': True}))")
    said = r"^Ray cannot be started on this machine: no room in /dev/shm; its logs: "
    with pytest.raises(StartError, match=said):
        connect(None, 1, 60.0)
    assert len(starts.read_text().splitlines()) == 1


def test_a_start_that_hangs(tmp_path, monkeypatch, ten_seconds_a_try, no_process_stays):
    starts, stop = instead(monkeypatch, tmp_path, "sys.stdin.read()"), threading.Event()
    with pytest.raises(StartError, match=r"run\.startup_timeout_s = 0\.3, tried 1 time: it was not up after 0 s"):
        connect(None, 1, 0.3)
    starts.unlink(missing_ok=True)

    def when_started() -> None:
        wait_for(starts.exists, "the first start")
        stop.set()

    threading.Thread(target=when_started, daemon=True).start()
    with pytest.raises(StartError, match="not wanted any more"):
        connect(None, 1, 60.0, stop)


def test_a_ray_that_is_up_too_late_is_ended(tmp_path, monkeypatch, no_process_stays):
    """The caller gave up while this process joined it, which cannot be interrupted."""
    stop, left = threading.Event(), list[str]()
    instead(monkeypatch, tmp_path, "print(json.dumps({'address': 'here'}))\nsys.stdin.read()")
    monkeypatch.setattr(ray_connection, "reread_environment", lambda: None)
    monkeypatch.setattr(ray_connection, "_init", lambda **_: stop.set())
    monkeypatch.setattr(ray_connection, "_leave", lambda: left.append("left"))
    with pytest.raises(StartError, match="not wanted any more"):
        connect(None, 1, 60.0, stop)
    assert left == ["left"] and ray_connection._current is None


async def test_a_cancelled_start_reports_what_it_waits_for(tmp_path, monkeypatch):
    starting, told = threading.Event(), list[str]()

    def start(cluster: object, cpus: int, timeout_s: float, stop: threading.Event, store_bytes: object) -> Connection:
        starting.set()
        assert stop.wait(PATIENCE)
        raise StartError("it was not wanted any more")

    monkeypatch.setattr(ray_cluster, "connect", start)
    cluster = RayCluster(preflight(write_world(tmp_path)), RunDirectory(tmp_path / "run"))
    cluster.tell = told.append
    connecting = asyncio.create_task(cluster.connect())
    await asyncio.to_thread(starting.wait, PATIENCE)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert told == ["waiting until Ray has given up its start, for up to 10 s"]


@pytest.mark.parametrize(("load", "why"), [(3.9, ""), (17.6, " (load 18 on 2 cores)")])
async def test_workers_that_load_for_long_are_named(tmp_path, monkeypatch, load, why):
    monkeypatch.setattr(ray_cluster, "_LOADING_S", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    loading, told = {"trainer", "rollout-0"}, list[str]()
    cluster = RayCluster(preflight(write_world(tmp_path)), RunDirectory(tmp_path / "run"))
    cluster.tell = lambda text: (told.append(text), loading.discard("rollout-0"))
    reporting = asyncio.create_task(cluster._report(loading))
    await until(lambda: len(told) > 1, "two lines")
    reporting.cancel()
    assert told[:2] == [f"still loading: rollout-0, trainer{why}", f"still loading: trainer{why}"]


@pytest.mark.parametrize(("placement", "given"), [({}, "0"), ({"object_store": "1.5GiB"}, "1610612736")])
async def test_the_object_store_of_the_recipe(tmp_path, monkeypatch, placement, given):
    told = "print(json.dumps({'error': ' '.join(['given', *sys.argv[3:]]), 'final': True}))"
    instead(monkeypatch, tmp_path, told)
    monkeypatch.setattr(devices, "_SHARED_MEMORY", tmp_path)
    config = write_world(tmp_path / "world", run={"runtime": "ray"}, placement=placement)
    cluster = RayCluster(preflight(config), RunDirectory(tmp_path / "run"))
    with pytest.raises(StartError, match=f"on this machine: given {given}; its logs"):
        await cluster.connect()


def test_every_start_has_its_own_session_folder_and_token(tmp_path, monkeypatch):
    """Only the environment holds the token."""
    told = "import os\nprint(json.dumps({'address': os.environ['RAY_AUTH_MODE'] + ' ' + os.environ['RAY_AUTH_TOKEN']}))"
    instead(monkeypatch, tmp_path, told + "\nsys.stdin.read()\nprint(json.dumps({'lost': 'its raylet ended'}))")
    monkeypatch.setenv("HOME", str(tmp_path))
    tokens, folders = set[str](), set[Path]()
    for _ in range(2):
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)  # as in another command
        local = LocalRay(1)
        mode, token = local.address(PATIENCE, threading.Event()).split()
        assert mode == "token" and len(token) == 64 and token == os.environ["RAY_AUTH_TOKEN"]
        assert token not in " ".join(psutil.Process(local.pid).cmdline())
        assert os.getsid(local.pid) == local.pid != os.getsid(0)
        local.end()
        assert not psutil.pid_exists(local.pid)
        tokens.add(token)
        folders.add(local.folder)
    assert len(tokens) == len(folders) == 2
    assert {(one.parent.name, one.name[:11]) for one in folders} == {("rays", "omni-async-")}
    assert {one.stat().st_mode & 0o777 for one in folders} == {0o700}
    left = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(left) >= 3 and not [token for token in tokens for text in left if token in text]


def test_the_folder_of_a_ray(tmp_path, monkeypatch):
    """In the temporary folder, or in /tmp if its path is too long."""
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert ray_local._private_folder().parent == tmp_path
    monkeypatch.setattr(ray_local, "_LONGEST_FOLDER", 0)
    folder = ray_local._private_folder()
    folder.rmdir()
    assert folder.parent == Path("/tmp") and folder.name.startswith("omni-async-")


def test_no_dashboard_is_started_and_only_logs_of_a_lost_ray_stay(tmp_path, monkeypatch):
    folder, asked = tmp_path / "omni-async-1" / "r", dict[str, object]()

    def init(**options: object) -> SimpleNamespace:
        asked.update(options)
        return SimpleNamespace(address_info={"gcs_address": "here"})

    monkeypatch.setattr("ray.init", init)
    assert head.start(1, folder) == "here" and asked["object_store_memory"] is None
    assert head.start(1, folder, 2**30) == "here" and asked["object_store_memory"] == 2**30
    assert asked["include_dashboard"] is False and asked["_temp_dir"] == str(folder)
    for name in ("logs/raylet.out", "sockets/raylet", "spilled/object"):
        (folder / "session_1" / name).parent.mkdir(parents=True)
        (folder / "session_1" / name).touch()
    childless = SimpleNamespace(children=lambda recursive: [])
    monkeypatch.setattr(head, "psutil", SimpleNamespace(**vars(psutil) | {"Process": lambda: childless}))
    monkeypatch.setattr(head.os, "_exit", lambda code: None)
    head.end(folder, 1)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["raylet.out"]
    head.end(folder, 0)
    assert not folder.parent.exists() and (tmp_path / "rays").is_dir()


@pytest.mark.slow
def test_nothing_stays_of_a_real_ray(monkeypatch):
    monkeypatch.setattr(ray_local, "_LONGEST_FOLDER", 0)  # the path of the test's own folder is too long for sockets
    local = LocalRay(1)
    local.address(4 * PATIENCE, threading.Event())
    assert [*local.folder.glob("r/session_*/logs")]

    def alive() -> list[str]:
        children = psutil.Process(local.pid).children()
        return sorted(one.name() for one in children if one.status() != psutil.STATUS_ZOMBIE)

    wait_for(lambda: alive() == ["gcs_server", "raylet"], "the end of Ray's other processes")
    local.end()
    assert not local.folder.exists()


def ray_cluster_of(folder: Path) -> RayCluster:
    return RayCluster(preflight(write_world(folder)), RunDirectory(folder / "run"))


async def test_a_worker_that_ends_before_it_answers_is_drained(tmp_path):
    cluster, asked_to_leave = ray_cluster_of(tmp_path), list[str]()

    class Ended:
        async def leave(self) -> None:
            asked_to_leave.append("reward-0")
            raise PeerLost("reward-0 is gone")

    cluster._actors["reward-0"] = Ended()
    await cluster.drain_worker("reward-0")
    assert asked_to_leave == ["reward-0"]


@pytest.mark.parametrize(("local", "host"), [(object(), "127.0.0.1"), (None, "192.0.2.7")])
def test_addresses_that_roles_listen_at(tmp_path, monkeypatch, local, host):
    """Loopback on a Ray of this machine alone."""
    made, cluster = list[str](), ray_cluster_of(tmp_path)
    cluster._connection = Connection(True, local)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "_host", lambda worker, make: make())
    monkeypatch.setattr(ray_cluster, "load_named", lambda path: lambda context: made.append(context.host))
    monkeypatch.setattr(ray_cluster, "RayStore", object)
    monkeypatch.setattr(ray_cluster, "capture_output", lambda path: None)  # this process keeps its output
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.7")
    for worker in cluster._all_workers():
        cluster._spawn(worker)
    assert len(made) >= 4 and {*made} == {host}


def test_losses_have_a_reason(tmp_path, monkeypatch):
    for last, reason in (
        ("print(json.dumps({'lost': 'its gcs_server ended'}))", "its gcs_server ended"),
        ("", "its process ended with code 0"),
    ):
        instead(monkeypatch, tmp_path, "print(json.dumps({'address': 'here'}))\n" + last)
        local = LocalRay(1)
        assert local.address(PATIENCE, threading.Event()) == "here"
        assert local.wait_lost() == local.wait_lost() == reason
        local.end()
    instead(monkeypatch, tmp_path, "")
    with pytest.raises(StartFailed, match="its process ended with code 0"):
        LocalRay(1).address(PATIENCE, threading.Event())


def test_an_address_without_a_listener(monkeypatch):
    monkeypatch.setattr(ray_connection.ray, "init", lambda **_: pytest.fail("Ray would try for a quarter of an hour"))
    with unused_address() as unused:
        for key in ("run.ray_address", "RAY_ADDRESS"):
            with pytest.raises(StartError, match=rf"^{key}: nobody answers at {unused}: .*refused"):
                connect(ClusterAddress(unused, key), 1)


@pytest.mark.parametrize(("mode", "said"), [("", "with RAY_AUTH_MODE=token"), ("token", "the token in RAY_AUTH_TOKEN")])
def test_a_cluster_that_cannot_be_joined(monkeypatch, mode, said):
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray_connection.ray, "init", refuse)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(StartError, match=rf"^run\.ray_address: cannot join Ray at auto: Failed to con.*; .*{said}"):
        connect(ClusterAddress("auto", "run.ray_address"), 1)


def test_the_drivers_own_variables_are_not_handed_on(monkeypatch):
    own = ("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_RAYLET_PID")
    for name in own:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ray_local.prepare_driver()
    assert all(os.environ[name] and name not in ray_local.environment() for name in own)


@pytest.mark.parametrize(
    "users", [{"RAY_AUTH_TOKEN": "a user's"}, {"RAY_AUTH_TOKEN_PATH": "somewhere"}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_a_users_own_token_is_respected(monkeypatch, users):
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    ray_local.use_a_token()
    assert os.environ.get("RAY_AUTH_TOKEN") == users.get("RAY_AUTH_TOKEN")
    assert os.environ.get("RAY_AUTH_MODE") == users.get("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE"))


@pytest.mark.parametrize("cluster", [None, ClusterAddress("auto", "run.ray_address")])
def test_the_thread_that_joins_ray_ends(tmp_path, monkeypatch, cluster):
    instead(monkeypatch, tmp_path, "print(json.dumps({'address': 'here'}))\nsys.stdin.read()")
    threads: list[threading.Thread] = []
    monkeypatch.setattr(ray_connection.ray, "init", lambda **_: threads.append(threading.current_thread()))
    connect(cluster, 1).close()
    (joined,) = threads
    joined.join(PATIENCE)
    assert not joined.is_alive()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_that_joins_ray_twice_reads_what_it_stored():
    """In a child process: where two threads number their objects alike, Ray may abort the process."""
    done = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "[('first', 0), ('second', 0), ('first', 1), ('second', 1)]\n"), (
        done.stderr
    )


_TWICE = """
import ray
from omni_async.aio.threads import DaemonThread
from omni_async.runtime.on_ray.connection import connect
first, second = DaemonThread("first"), DaemonThread("second")
connection = first.submit(connect, None, 1).result()
second.submit(ray.put, "a value").result()
first.submit(connection.close).result()
connection = second.submit(connect, None, 1).result()
threads = {"first": first, "second": second}
stored = [threads[name].submit(ray.put, (name, i)).result() for i in range(2) for name in threads]
print(ray.get(stored, timeout=60))
connection.close()
"""
