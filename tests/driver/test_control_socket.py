"""Tests a running job's socket: who may use it, what it answers, and that nonsense does not disturb the run."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.driver.control_socket import ControlError, ControlSocket, Request, ask


async def echo(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    return {"scale": request.scale}


def serve(
    path: Path,
    answer: Callable[[Request, Callable[[str], None]], Awaitable[dict[str, Any]]] | None,
    talk: Callable[[], Any],
) -> Any:
    """Runs `talk` in a thread while the socket is served, and returns its result."""

    async def main() -> Any:
        async with ControlSocket(path) as control:
            control.answer = answer
            return await asyncio.wait_for(asyncio.to_thread(talk), 10)

    return asyncio.run(main())


def test_an_answer_that_takes_a_while_says_what_it_waits_for(tmp_path: Path) -> None:
    path, received, heard = tmp_path / "control.sock", [], threading.Event()

    async def slow(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        tell("rollout-1: loading")
        assert await asyncio.to_thread(heard.wait, 10), "it arrives while the answer is being waited for"
        tell("rollout-1: at work")
        return {"done": True}

    def talk() -> dict[str, Any]:
        return ask(path, Request({"rollout": 2}), tell=lambda text: (received.append(text), heard.set()))

    assert serve(path, slow, talk) == {"done": True}
    assert received == ["rollout-1: loading", "rollout-1: at work"]


def test_a_client_that_went_away_does_not_disturb_what_is_done(tmp_path: Path) -> None:
    path, gone, done = tmp_path / "control.sock", threading.Event(), threading.Event()

    async def slow(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        await asyncio.to_thread(gone.wait, 10)
        for _ in range(100):
            tell("rollout-1: loading")
            await asyncio.sleep(0)
        done.set()
        return {}

    def talk() -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"{}\n")
        gone.set()
        return done.wait(10)

    assert serve(path, slow, talk)


def test_only_the_user_may_ask_and_the_socket_goes_with_the_run_and_one_that_was_left_behind_is_replaced(
    tmp_path: Path,
) -> None:
    """Checks so in a run folder with a long name."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    path = folder / "control.sock"
    path.write_text("left behind")

    def talk() -> tuple[int, dict[str, Any]]:
        return stat.S_IMODE(path.stat().st_mode), ask(path, Request({"rollout": 3}))

    assert serve(path, echo, talk) == (0o600, {"scale": {"rollout": 3}})
    assert not path.exists()


def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path) -> None:
    async def refuses(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        raise ValueError("rollout: no room\nand a traceback")

    path = tmp_path / "control.sock"
    with pytest.raises(ControlError, match=r": rollout: no room$"):
        serve(path, refuses, lambda: ask(path, Request({"rollout": 3})))


def test_a_run_that_is_not_there_or_not_ready_says_so(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with pytest.raises(ControlError, match="is not running here"):
        ask(path, Request())
    assert serve(path, None, lambda: ask(path, Request())) == {"doing": "starting", "parts": {}}
    with pytest.raises(ControlError, match="nothing can be changed yet: the run is starting"):
        serve(path, None, lambda: ask(path, Request({"rollout": 3})))


async def test_a_run_that_ends_before_it_answers_says_so(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "control.sock"))
    listening.listen()

    asking = asyncio.create_task(asyncio.to_thread(ask, tmp_path / "control.sock", Request()))
    connection, _ = await asyncio.to_thread(listening.accept)
    connection.recv(100)
    connection.close()
    with pytest.raises(ControlError, match="ended before it answered"):
        await asking


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.binary(max_size=300) | st.just(b'{"scale": {"rollout": 0}}') | st.just(b"[" * 70_000), min_size=1, max_size=4
    )
)
def test_nonsense_is_answered_or_cut_off_and_the_next_request_is_served(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "control.sock"

    def talk() -> dict[str, Any]:
        for line in lines:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(path))
                try:
                    connection.sendall(line + b"\n")
                    connection.recv(1000)
                except OSError:
                    pass  # it would not hear more
        return ask(path, Request())

    assert serve(path, echo, talk) == {"scale": {}}
