"""Tests starting a local Ray: how often it is tried, what is reported when it does not come up. Scripts of a few lines
stand for Ray."""

from __future__ import annotations

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
from omni_async.runtime.on_ray import connection as ray_connection
from omni_async.runtime.on_ray import local as ray_local
from omni_async.runtime.on_ray.connection import StartError, connect
from omni_async.runtime.on_ray.local import LocalRay, StartFailed
from tests.patience import PATIENCE, wait_for
from tests.ports import unused_address

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


def test_a_start_that_timed_out_is_tried_again_as_long_as_there_is_time_and_then_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ten_seconds_a_try: None
) -> None:
    starts = instead(monkeypatch, tmp_path, f"print(json.dumps({{'error': {TIMED_OUT!r}, 'final': False}}))")
    with pytest.raises(StartError) as failed:
        connect(None, 1, 25.0)
    assert len(starts.read_text().splitlines()) == 3
    text = str(failed.value)
    said = f"Ray did not start within run.startup_timeout_s = 25, tried 3 times: {TIMED_OUT}"
    assert text.startswith(said) and "\n" not in text
    assert "is the machine overloaded?" in text
    assert f"Ray did not start ({TIMED_OUT}); trying again" in caplog.text


def test_what_another_try_would_not_change_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = instead(monkeypatch, tmp_path, "print(json.dumps({'error': 'no room in /dev/shm', 'final': True}))")
    said = r"^Ray cannot be started on this machine: no room in /dev/shm; its logs: "
    with pytest.raises(StartError, match=said) as failed:
        connect(None, 1, 60.0)
    assert len(starts.read_text().splitlines()) == 1
    folder = Path(str(failed.value).rpartition(" ")[2])
    assert folder.stat().st_mode & 0o777 == 0o700, "no other user may look into it"


def test_a_start_that_hangs_ends_when_the_time_is_over_or_it_is_not_wanted_any_more(
    tmp_path, monkeypatch, ten_seconds_a_try, no_process_stays
):
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


def test_what_is_started_is_in_a_session_of_its_own_and_its_token_stands_in_no_file(tmp_path, monkeypatch):
    told = "import os\nprint(json.dumps({'address': os.environ['RAY_AUTH_MODE'] + ' ' + os.environ['RAY_AUTH_TOKEN']}))"
    instead(monkeypatch, tmp_path, told + "\nsys.stdin.read()\nprint(json.dumps({'lost': 'its raylet ended'}))")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local = LocalRay(1)
    mode, token = local.address(PATIENCE, threading.Event()).split()
    assert mode == "token" and len(token) == 64 and token == os.environ["RAY_AUTH_TOKEN"]
    assert os.getsid(local.pid) == local.pid != os.getsid(0)
    assert not (tmp_path / "home").exists()
    local.end()
    assert not psutil.pid_exists(local.pid)


def test_the_loss_is_reported_with_its_reason_and_a_process_that_ends_silently_is_a_loss_too(tmp_path, monkeypatch):
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


def test_an_address_without_a_listener_is_refused_before_ray_tries_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection.ray, "init", lambda **_: pytest.fail("Ray would try for a quarter of an hour"))
    with unused_address() as unused:
        for key in ("run.ray_address", "RAY_ADDRESS"):
            with pytest.raises(StartError, match=rf"^{key}: nobody answers at {unused}: .*refused"):
                connect(ClusterAddress(unused, key), 1)


@pytest.mark.parametrize(
    ("mode", "said"), [("", "joined with RAY_AUTH_MODE=token"), ("token", "the token in RAY_AUTH_TOKEN")]
)
def test_a_cluster_that_cannot_be_joined_is_reported_with_what_a_token_asks_for(monkeypatch, mode, said):
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray_connection.ray, "init", refuse)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    refused = r"^run\.ray_address: cannot join Ray at auto: Failed to connect to Ray cluster; "
    with pytest.raises(StartError, match=refused) as failed:
        connect(ClusterAddress("auto", "run.ray_address"), 1)
    assert said in str(failed.value)


def test_what_is_set_for_the_driver_alone_is_not_handed_on_and_a_users_own_token_or_doing_without_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = ("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_RAYLET_PID")
    for name in own:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ray_local.prepare_driver()
    assert all(os.environ[name] and name not in ray_local.environment() for name in own)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "somewhere")
    ray_local.use_a_token()
    assert "RAY_AUTH_TOKEN" not in os.environ
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    ray_local.use_a_token()
    assert "RAY_AUTH_TOKEN" not in os.environ and os.environ["RAY_AUTH_MODE"] == "disabled"


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
