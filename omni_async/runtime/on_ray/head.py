"""Starts a local Ray and keeps it for as long as a driver wants it.

Run as a script, in its own session, by `local`.

A Ray started by the driver itself has two problems:
- It is in the driver's process group. Signals that `timeout`, SLURM and systemd send to the group, and Ctrl-C at a
  terminal, end Ray's processes at once; then the driver cannot end anything in order.
- The driver is killed when its own Ray is lost.

So this process starts Ray. It ends
- when the driver requests it or is gone (its end of the pipe to our stdin closes, whatever killed it), or
- when one of Ray's own processes ends, with the reason as its last line: its end means that Ray is lost.

In both cases, no process of this Ray is left.

Messages to the driver are lines of JSON: `{"address": ...}` or `{"error": ..., "final": ...}`, and `{"lost": ...}`.
Imports nothing of the package, which is not on this process's path, and therefore starts sooner.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

_SERVERS = ("gcs_server", "raylet")
# Interval of checks for dead processes.
_LOOK_S = 0.2
# Errors that another try would not change.
_FINAL = (ValueError, TypeError, OSError, ImportError, AttributeError)


def main() -> None:
    """Start Ray and keep it. Exit code 0: the driver ended it; 1: Ray was lost or did not start."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # otherwise output of libraries would be read as an answer
    cpus, folder, store_bytes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) or None
    leaving = threading.Event()
    ending = threading.Thread(target=end_with, args=(os.getppid(), folder, leaving), daemon=True)
    ending.start()
    try:
        address = start(cpus, folder, store_bytes)
    except Exception as error:  # noqa: BLE001 (the driver decides how to react)
        text = " ".join(str(error).split()) or type(error).__name__
        tell(
            answers,
            error=text[:500],
            final=isinstance(error, _FINAL) and not isinstance(error, TimeoutError | ConnectionError),
        )
        end(folder, 1)
    servers = keep_servers(psutil.Process().children())
    tell(answers, address=address)
    while not (dead := [name for name, server in servers.items() if is_dead(server)]):
        time.sleep(_LOOK_S)
    if leaving.is_set():
        ending.join()  # it has killed them, and ends this process
    tell(answers, lost=f"its {' and '.join(dead)} ended")
    end(folder, 1)


def keep_servers(processes: Iterable[psutil.Process]) -> dict[str, psutil.Process]:
    """Return Ray's servers by name, and kill its other processes: a dashboard, an autoscaler, a reader of logs.

    Nothing uses them here. They take 170 MB, and CPU time as long as the run lasts."""
    servers = {}
    for process in processes:
        if (name := process.name()) in _SERVERS:
            servers[name] = process
        else:
            process.kill()
    return servers


def end_with(driver: int, folder: Path, leaving: threading.Event) -> None:
    """Set `leaving` and end Ray as soon as the driver requests it or is gone.

    A process forked by the driver may hold the pipe open for longer, so the driver's death counts, too."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0] and os.getppid() == driver:
        pass
    leaving.set()
    end(folder, 0)


def start(cpus: int, folder: Path, store_bytes: int | None = None) -> str:
    """Start Ray and return its address. `store_bytes`: size of its object store; None: Ray's choice."""
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    options |= {"num_cpus": cpus, "object_store_memory": store_bytes, "include_dashboard": False}
    context: Any = ray.init(address="local", _temp_dir=str(folder), **options)
    return str(context.address_info["gcs_address"])


def is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tell(answers: IO[str], **answer: Any) -> None:
    try:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    except BrokenPipeError:
        return  # the driver is gone, which its thread notices


def end(folder: Path, code: int) -> NoReturn:
    """Kill every process that was started here, including actors and their children.

    Removes the folder of this Ray, or keeps its logs if Ray was lost or did not start (`code` 1)."""
    family = psutil.Process().children(recursive=True)
    for process in family:
        try:
            process.kill()
        except psutil.Error:
            continue  # the process has already ended
    psutil.wait_procs(family, timeout=5)
    if code == 0:
        shutil.rmtree(folder.parent, ignore_errors=True)
    for session in folder.glob("session_*"):
        if not session.is_symlink():
            for path in session.iterdir():
                if path.is_dir() and not path.is_symlink() and path.name != "logs":
                    shutil.rmtree(path, ignore_errors=True)
    os._exit(code)  # a normal exit of Ray would wait for processes that are gone


if __name__ == "__main__":
    main()
