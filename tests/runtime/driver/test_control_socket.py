"""Tests a running job's socket: who may use it, what it answers, and that neither nonsense nor children hold it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.driver import control_socket
from omni_async.runtime.driver.control_socket import ControlError, ControlSocket, Request, ask
from tests.support.patience import PATIENCE, until

Reply = Callable[[Request, Callable[[str], None]], Awaitable[dict[str, Any]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[socket.socket]:
    """Listens in place of a run."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(0)
        yield listening


async def echo(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    return {"scale": request.scale}


def serve(path: Path, answer: Reply | None, talk: Callable[[], Any]) -> Any:
    """Runs `talk` in a thread while the socket is served, and returns its result."""

    async def main() -> Any:
        async with ControlSocket(path) as control:
            control.answer = answer
            return await asyncio.wait_for(asyncio.to_thread(talk), 2 * PATIENCE)

    return asyncio.run(main())


def send(path: Path, content: bytes) -> socket.socket:
    """Sends this to the socket, and returns the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    connection.connect(str(path))
    with suppress(ConnectionError):  # a busy run answers and closes before it reads
        connection.sendall(content)
    return connection


def raw(path: Path, content: bytes) -> bytes:
    """Sends this and returns all of the answer."""
    with send(path, content) as connection, connection.makefile("rb") as answer:
        return answer.read()


def test_progress_arrives_before_the_answer(path: Path) -> None:
    received, heard = [], threading.Event()

    async def slow(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        tell("rollout-1: loading")
        assert await asyncio.to_thread(heard.wait, PATIENCE)
        tell("rollout-1: at work")
        return {"done": True}

    def talk() -> dict[str, Any]:
        return ask(path, Request({"rollout": 2}), tell=lambda text: (received.append(text), heard.set()))

    assert serve(path, slow, talk) == {"done": True}
    assert received == ["rollout-1: loading", "rollout-1: at work"]


def test_a_client_that_went_away(path: Path) -> None:
    gone, done = threading.Event(), threading.Event()

    async def slow(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        assert await asyncio.to_thread(gone.wait, PATIENCE)
        for _ in range(100):
            tell("rollout-1: loading")
            await asyncio.sleep(0)
        done.set()
        return {}

    def talk() -> bool:
        send(path, b"{}\n").close()
        gone.set()
        return done.wait(PATIENCE)

    assert serve(path, slow, talk)


def test_only_the_user_may_ask(tmp_path: Path) -> None:
    """Replaces a socket that was left behind, in a folder with a long name; it goes with the run."""
    path = tmp_path / ("long" * 40) / "control.sock"
    path.parent.mkdir()
    path.write_text("left behind")

    def talk() -> tuple[int, dict[str, Any]]:
        return stat.S_IMODE(path.stat().st_mode), ask(path, Request({"rollout": 3}))

    assert serve(path, echo, talk) == (0o600, {"scale": {"rollout": 3}})
    assert not path.exists()


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_a_refusal_is_one_line_without_credentials(path: Path, error: type[Exception]) -> None:
    received: list[str] = []

    async def refuses(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        tell("https://me:hunter2@h is asked")
        raise error("https://me:hunter2@h has no room\nand a traceback")

    with pytest.raises(ControlError, match=r": https://\*\*\*@h has no room$"):
        serve(path, refuses, lambda: ask(path, Request({"rollout": 3}), tell=received.append))
    assert received == ["https://***@h is asked"]


def test_a_run_that_starts_or_is_over(path: Path) -> None:
    with pytest.raises(ControlError, match="is not running here"):
        ask(path, Request())
    assert serve(path, None, lambda: ask(path, Request())) == {"doing": "starting", "parts": {}}
    with pytest.raises(ControlError, match="nothing can be changed yet: the run is starting"):
        serve(path, None, lambda: ask(path, Request({"rollout": 3})))


def test_a_stop_while_a_run_starts(path: Path) -> None:
    """The answer has the step that is abandoned; a session would save what it has."""
    stopped: list[str] = []

    async def main(answer: Reply | None) -> Any:
        async with ControlSocket(path) as control:
            control.answer, control.doing = answer, "starting Ray"
            control.stop = lambda: stopped.append(control.doing)
            return await asyncio.wait_for(asyncio.to_thread(ask, path, Request(stop=True)), 2 * PATIENCE)

    assert asyncio.run(main(None)) == {"doing": "starting Ray"}
    assert asyncio.run(main(echo)) == {} and len(stopped) == 2


def test_idle_clients_are_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_MOST_CLIENTS", 2)
    monkeypatch.setattr(control_socket, "_PATIENCE_S", 0.1)

    def talk() -> dict[str, Any]:
        idle = [send(path, b"{") for _ in range(4)]
        for one in reversed(idle):
            with suppress(ConnectionError):
                while one.recv(1000):
                    pass
        return ask(path, Request({"rollout": 2}))

    assert serve(path, echo, talk) == {"scale": {"rollout": 2}}


def test_too_many_clients(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_MOST_CLIENTS", 2)

    def talk() -> None:
        idle = [send(path, b"") for _ in range(2)]
        with pytest.raises(ControlError, match="it is busy: 2 clients ask already; try again in 10 s") as raised:
            ask(path, Request())
        assert type(raised.value) is ControlError
        for one in idle:
            one.close()

    serve(path, echo, talk)


@pytest.mark.usefixtures("listening")
def test_clients_that_wait_to_connect(path: Path) -> None:
    with send(path, b""), pytest.raises(ControlError, match=r"control\.sock is busy: too many clients wait"):
        ask(path, Request())


@pytest.mark.parametrize("line", [b'{"doing":"x"}\n', b"x"])
@pytest.mark.parametrize("stop", [False, True])
def test_an_endless_answer(path: Path, listening: socket.socket, line: bytes, stop: bool) -> None:
    heard, ended = [], threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            while not ended.wait(0.01):
                connection.sendall(line)

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(ControlError, match=r"does not answer within 0\.1 s"):
            ask(path, Request(stop=stop), 0.1, heard.append)
    finally:
        ended.set()
        dripping.join()
    assert set(heard) <= {"x"}


def test_a_change_takes_longer_than_a_line_may(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_BEAT_S", 0.02)
    clock, heard, lines, read = time.monotonic(), list[str](), list[bytes](), control_socket._line

    async def slow(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        nonlocal clock
        for number in range(3):
            clock += PATIENCE / 2
            await until(lambda number=number: len(lines) > number, "a sign of life")
        return {"done": True}

    monkeypatch.setattr(control_socket, "_line", lambda *how: lines.append(read(*how)) or lines[-1])
    monkeypatch.setattr(control_socket, "time", types.SimpleNamespace(monotonic=lambda: clock))
    assert serve(path, slow, lambda: ask(path, Request({"rollout": 2}), PATIENCE, heard.append)) == {"done": True}
    assert heard == []


async def test_a_run_that_ends_before_it_answers(path: Path, listening: socket.socket) -> None:
    asking = asyncio.create_task(asyncio.to_thread(ask, path, Request()))
    connection, _ = await asyncio.to_thread(listening.accept)
    connection.recv(100)
    connection.close()
    with pytest.raises(ControlError, match="ended before it answered"):
        await asking


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"{}".ljust(2**16), rb'\{"status":\{"scale":\{\}\}\}\n'),
        (b"{}".ljust(2**16 + 1), b""),
        (b'{"run": "rm"}', b".*unknown field `run`.*"),
    ],
    ids=["64 KiB", "more", "another command"],
)
def test_bounds_of_a_request(path: Path, sent: bytes, answer: bytes) -> None:
    assert re.fullmatch(answer, serve(path, echo, lambda: raw(path, sent + b"\n")), re.DOTALL)


NONSENSE = st.binary(max_size=300) | st.just(b'{"scale": {"rollout": 0}}') | st.just(b"[" * 70_000)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(NONSENSE, min_size=1, max_size=4))
def test_nonsense(lines, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "control.sock"

    def talk() -> dict[str, Any]:
        for line in lines:
            with suppress(OSError), send(path, line + b"\n") as connection:  # it may not want to hear more
                connection.recv(1000)
        return ask(path, Request())

    assert serve(path, echo, talk) == {"scale": {}}


# ---- children that a scorer or a library leaves behind ---------------------------------------------------------------

# A run that answers at its socket and has started children in three ways, who all outlive it. Each says its pid.
RUN = """
import asyncio, multiprocessing, os, subprocess, sys, time
from pathlib import Path
from omni_async.runtime.driver.control_socket import ControlSocket
from omni_async.records.write.rundir import RunDirectory

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


def test_a_killed_run_is_free_though_its_children_live(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    children: list[int] = []
    try:
        assert process.stdout is not None
        children += [int(process.stdout.readline()) for _ in range(3)]
        run = RunDirectory(tmp_path)
        assert run.is_running()
        process.kill()
        process.wait()
        for child in children:
            os.kill(child, 0)
        assert not run.is_running()
        run._claim()
        run.release()
        with pytest.raises(ControlError, match=r"is not running here: .*Connection refused"):
            ask(run.control, Request(), timeout_s=PATIENCE)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_a_forked_child_keeps_its_parents_lock(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run._claim()
    if (child := os.fork()) == 0:
        try:
            run.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert RunDirectory(tmp_path).is_running()
    run.release()
    assert not RunDirectory(tmp_path).is_running()
