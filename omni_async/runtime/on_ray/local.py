"""Runs a Ray of this machine for one driver, in processes that neither get the driver's signals nor outlive it."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from omni_async.runtime.on_ray import head

# Sockets in Ray's folder have paths of up to 66 characters below it, and Linux takes 107 in all.
_LONGEST_FOLDER = 107 - 66
_END_S = 10.0
# For the driver alone: actors and Ray's own processes do not get these.
_DRIVERS_OWN = {
    # Ray would die of SIGTERM before the driver's handler is installed again.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray ends a driver whose global store has been gone for 60 s; a run handles that itself, in order and sooner.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
}
# Names the process whose death ends this one when its node is gone. Without it that is the parent, if the parent is
# process 1 (of a container, or a service manager).
_LIFELINE = "RAY_RAYLET_PID"


class StartFailed(RuntimeError):
    """Raised when Ray did not come up. `final`: another try would fail too."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class LocalRay:
    """A Ray on this machine, started at once with `cpus` CPUs; `address` waits for it.

    `store_bytes`: size of its object store; None: Ray's choice. `folder` contains its logs; no other user may read it.
    It stays only if Ray is lost or does not start."""

    def __init__(self, cpus: int, store_bytes: int | None = None) -> None:
        use_a_token()
        self.folder = _private_folder()
        log = self.folder / "start.log"
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", head.__file__, str(cpus), str(self.folder / "r"), str(store_bytes or 0)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                start_new_session=True,
                bufsize=0,
            )
        self._asking = threading.Lock()
        self._lost: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, seconds: float, stop: threading.Event) -> str:
        """Return the address once Ray is up.

        Raises StartFailed if that takes longer than `seconds`, fails, or is no longer wanted."""
        answer = self._answer(seconds, stop)
        if "address" not in answer:
            raise StartFailed(answer.get("error") or answer["lost"], final=answer.get("final", False))
        return str(answer["address"])

    def _answer(self, seconds: float, stop: threading.Event) -> dict[str, Any]:
        assert self._process.stdout is not None
        left = seconds
        while not select.select([self._process.stdout], [], [], min(0.1, max(left, 0)))[0]:
            left -= 0.1
            if stop.is_set():
                raise StartFailed("it was not wanted any more", final=True)
            if left <= 0:
                raise StartFailed(f"it was not up after {seconds:.0f} s")
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return {"lost": f"its process ended with code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_lost(self) -> str:
        """Block until Ray is lost and return why."""
        with self._asking:
            if self._lost is None:
                self._lost = str(self._line()["lost"])
        return self._lost

    def end(self) -> None:
        """End Ray; none of its processes is left when this returns."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends its child processes
            self._process.wait()


def prepare_driver() -> None:
    """Set the environment variables that Ray reads when it is imported. Must be called before that."""
    # Ray prints a page about every dead process, between the lines of the console, which reports the effect on the run
    # itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|Raylet is terminated")
    for name, value in _DRIVERS_OWN.items():
        os.environ.setdefault(name, value)
    os.environ[_LIFELINE] = str(os.getpid())


def use_a_token() -> None:
    """Make Ray's processes and this one authenticate to each other with a token that is written nowhere.

    Does nothing if the user has chosen a token or disabled authentication. Ray would write a token to the home folder,
    readable by everybody."""
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        return
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _private_folder() -> Path:
    """Create a folder for Ray that no other user can enter, because everybody can enter Ray's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="omni-async-", dir=os.environ.get("RAY_TMPDIR")))
    if len(str(folder)) + 2 <= _LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="omni-async-", dir="/tmp"))


def environment() -> dict[str, str]:
    """Return the initial environment of Ray's processes, and thus of all actors.

    It is inherited by the processes that Ray keeps ready for any actor. A job's environment would make Ray start
    another process for each actor."""
    passed_on = {name: value for name, value in os.environ.items() if name not in {*_DRIVERS_OWN, _LIFELINE}}
    # Otherwise vLLM and diffusers contact a hub when they are imported.
    passed_on.setdefault("HF_HUB_OFFLINE", "1")
    passed_on["RAY_DEDUP_LOGS"] = "0"
    # Workers do the work of the run. At Ray's nice 15 any other program on the machine takes their cores.
    passed_on.setdefault("RAY_worker_niceness", "0")
    # The records of calls are for the dashboard, which is not started: without them Ray's global store does not grow by
    # 100 MB.
    passed_on.setdefault("RAY_task_events_report_interval_ms", "0")
    return passed_on
