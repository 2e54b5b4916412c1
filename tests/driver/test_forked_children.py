"""Tests that children that a scorer or a library leaves behind hold nothing of a run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_async.driver.control_socket import ControlError, Request, ask
from omni_async.tracking.rundir import RunDirectory

# A run that answers at its socket and has started children in three ways, who all outlive it. Each says its pid.
RUN = """
import asyncio, multiprocessing, os, subprocess, sys, time
from pathlib import Path
from omni_async.driver.control_socket import ControlSocket
from omni_async.tracking.rundir import RunDirectory

def stay():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)

async def main():
    run = RunDirectory(Path(sys.argv[1]))
    run._claim()
    async with ControlSocket(run.control):
        if os.fork() == 0:
            stay()
        multiprocessing.get_context("fork").Process(target=stay).start()
        subprocess.Popen(["sh", "-c", "echo $$; exec sleep 600"], close_fds=False)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def killed_run(folder: Path) -> Iterator[list[int]]:
    """Kills a run and yields its children, which live."""
    run = subprocess.Popen([sys.executable, "-c", RUN, str(folder)], stdout=subprocess.PIPE, text=True)
    children: list[int] = []
    try:
        assert run.stdout is not None
        children += [int(run.stdout.readline()) for _ in range(3)]
        assert RunDirectory(folder).is_running()
        run.send_signal(signal.SIGKILL)
        run.wait()
        for child in children:
            os.kill(child, 0)
        yield children
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        run.kill()
        run.communicate()


def test_a_run_that_was_killed_is_free_though_its_children_live(tmp_path: Path) -> None:
    with killed_run(tmp_path):
        run = RunDirectory(tmp_path)
        assert not run.is_running()
        run._claim()
        run.release()
        with pytest.raises(ControlError, match=r"is not running here: .*Connection refused"):
            ask(run.control, Request(), timeout_s=5.0)


def test_a_forked_child_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    """Keeps the lock also if the child unwinds what its parent would unwind."""
    run = RunDirectory(tmp_path)
    run._claim()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run.release()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert RunDirectory(tmp_path).is_running()
    run.release()
    assert not RunDirectory(tmp_path).is_running()
