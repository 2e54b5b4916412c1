"""Tests which exceptions of a role leave a traceback in its worker's log, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omni_async.aio.waiting import Stopped
from omni_async.config import ConfigError
from omni_async.rewards.base import WrongScorer
from omni_async.rollout.base import EngineError
from omni_async.runtime.cluster import PeerLost, StartError, traceback_of
from omni_async.runtime.on_ray import shell
from omni_async.runtime.on_ray.shell import Shell

_TRACEBACK = "Traceback (most recent call last):"


class Role:
    def __init__(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        await self._failure

    async def generate(self) -> None:
        try:
            ["a prompt"].split()  # type: ignore[attr-defined]
        except AttributeError as error:
            failure = EngineError("rollout-0: failed at http://me:hunter2@host")
            failure.__cause__ = error
            self._failure.set_exception(failure)

    async def end(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Shell]:
    monkeypatch.setattr(shell.ray, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=dict))
    monkeypatch.setattr(shell, "showing", lambda given: {})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the shell sets it in this process
    return lambda build: Shell(build, 1)


async def test_waiters_for_one_exception_print_its_traceback_once(host, capsys):
    role = host(Role)
    waiting = [role.long_call("wait", ()) for _ in range(3)]
    *failures, _ = await asyncio.gather(*waiting, role.call("generate", ()), return_exceptions=True)
    assert [type(error) for error in failures] == [EngineError] * 3
    printed = capsys.readouterr().err
    assert printed.count(_TRACEBACK) == 2, "of the exception and its cause"
    assert "AttributeError: 'list' object has no attribute 'split'" in printed
    assert "EngineError: rollout-0: failed at http://***@host" in printed and "hunter2" not in printed


async def test_a_role_that_cannot_be_built_prints_its_traceback(host, capsys):
    def build() -> Any:
        raise LookupError("no model at this path")

    with pytest.raises(LookupError):
        host(build)
    printed = capsys.readouterr().err
    assert printed.count(_TRACEBACK) == 1 and "in build" in printed and "LookupError: no model at this path" in printed


@pytest.mark.parametrize(
    "error",
    [
        *(kind("reason") for kind in (PeerLost, StartError, ConfigError, Stopped, WrongScorer)),
        asyncio.CancelledError(),
        ExceptionGroup("two", [PeerLost("trainer is gone"), ExceptionGroup("one", [Stopped()])]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_orderly_end_prints_nothing(error, host, capsys):
    with pytest.raises(type(error)):
        await host(Role).long_call("end", (error,))
    assert capsys.readouterr().err == ""


def test_a_group_shows_what_is_unexpected_in_it():
    shown = traceback_of(ExceptionGroup("two", [PeerLost("trainer is gone"), KeyError("layers.0")]))
    assert "KeyError: 'layers.0'" in shown and "trainer is gone" not in shown


def test_an_exception_of_another_process_is_shown_here_too():
    error = ValueError("wrong")
    assert traceback_of(error) and not traceback_of(error)
    assert traceback_of(pickle.loads(pickle.dumps(error))) == "ValueError: wrong\n"
