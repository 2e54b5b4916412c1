"""Starts a local Ray and keeps it for as long as a driver wants it.

Run as a script, in a session of its own, by `local`.

A Ray that a driver starts by itself is in the driver's process group: what `timeout`, SLURM and systemd send to the
group, and Ctrl-C at a terminal, ends Ray's processes at once, and the driver can end nothing in order any more. And a
driver learns of the loss of a Ray of its own by being killed. So this process starts Ray, and
 - ends when the driver says so or is gone (its end of the pipe to our stdin closes, whatever killed it), and
 - ends when one of Ray's own processes does, with the reason as its last line: its end is the loss of Ray.
Whichever it is, no process of this Ray is left.

Talks to the driver in lines of JSON: `{"address": ...}` or `{"error": ..., "final": ...}`, and `{"lost": ...}`.
Imports nothing of the package, which is not on this process's path, and so starts sooner.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

_SERVERS = ("gcs_server", "raylet")
# How soon the death of a process is noticed.
_LOOK_S = 0.2
# What another try would not change.
_FINAL = (ValueError, TypeError, OSError, ImportError, AttributeError)


def main() -> None:
    """Start Ray and keep it. Exit code 0: the driver wanted no more; 1: Ray was lost or did not start."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that what libraries print is not taken for an answer
    cpus, folder, store_bytes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) or None
    threading.Thread(target=end_with, args=(os.getppid(), folder), daemon=True).start()
    try:
        address = start(cpus, folder, store_bytes)
    except Exception as error:  # noqa: BLE001 (the driver decides what becomes of it)
        text = " ".join(str(error).split()) or type(error).__name__
        tell(
            answers,
            error=text[:500],
            final=isinstance(error, _FINAL) and not isinstance(error, TimeoutError | ConnectionError),
        )
        end(folder, 1)
    servers = {name: child for child in psutil.Process().children() if (name := child.name()) in _SERVERS}
    tell(answers, address=address)
    while not (dead := [name for name, server in servers.items() if is_dead(server)]):
        time.sleep(_LOOK_S)
    tell(answers, lost=f"its {' and '.join(dead)} ended")
    end(folder, 1)


def end_with(driver: int, folder: Path) -> None:
    """End Ray as soon as the driver says so or is gone.

    A process that it forked may hold the pipe open for longer, so its death counts, too."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0] and os.getppid() == driver:
        pass
    end(folder, 0)


def start(cpus: int, folder: Path, store_bytes: int | None = None) -> str:
    """Start Ray and return its address. `store_bytes`: of its object store; None: Ray's choice."""
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
    """Kill every process that was started here, including actors and what they started.

    Of the files only logs stay, and not what was spilled."""
    family = psutil.Process().children(recursive=True)
    for process in family:
        try:
            process.kill()
        except psutil.Error:
            continue  # it has ended by itself
    psutil.wait_procs(family, timeout=5)
    for session in folder.glob("session_*"):
        if not session.is_symlink():
            for path in session.iterdir():
                if path.is_dir() and not path.is_symlink() and path.name != "logs":
                    shutil.rmtree(path, ignore_errors=True)
    os._exit(code)  # Ray's own way would wait for processes that are gone


if __name__ == "__main__":
    main()
