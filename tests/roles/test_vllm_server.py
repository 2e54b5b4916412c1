"""Tests the service around a vLLM server, with a process that behaves as one; tests/e2e has the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_async.config.reward import Reward, Server
from omni_async.config.section import Resources
from omni_async.plugins.services import ServiceSite
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers import model_servers
from omni_async.rewards.scorers.addresses import KnownAddresses, urls_of
from omni_async.roles import vllm_server
from omni_async.roles.vllm_server import ServerNotStarted, VllmServer
from tests.support.loops import settle
from tests.support.moved_clock import move_clock, on_a_moved_clock
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

FAKE = Path(__file__).with_name("fake_vllm.py")
QWEN = Server(name="qwen", model="/models/qwen", args=("--max-model-len", "1024"))


async def nothing(*_: Any) -> dict[str, str]:
    return {}


def server_of(folder: Path, behaviour: str, server: Server = QWEN, tell: Any = nothing) -> VllmServer:
    site = ServiceSite("qwen-0", 0, None, None, "127.0.0.1", tell, nothing)
    made = VllmServer(site, server, folder / "servers")
    made._command = lambda port: [sys.executable, str(FAKE), behaviour, str(port)]
    return made


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def test_a_server_starts_keeps_its_token_secret_and_is_lost_with_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "_ASK_S", 0.01)
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)

    made, other = server_of(tmp_path, "well", tell=tell), server_of(tmp_path, "well")
    assert len(made._token) >= 32 and made._token != other._token
    command, tried = made._command, list[int]()

    def with_a_thief(port: int) -> list[str]:
        tried.append(port)
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))
        return command(port)

    made._command = with_a_thief
    try:
        assert await made.start() == f"http://:{made._token}@127.0.0.1:{tried[0]}"
        assert made._token not in " ".join(psutil.Process(made._process.pid).cmdline())
        running = asyncio.ensure_future(made.run())
        await settle()
        assert not running.done()
        os.killpg(made._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="vLLM ended with -9: nothing was printed"):
            await running
    finally:
        await made.close()
    assert told and made._token not in "".join([*told, *texts_in(tmp_path)])


def texts_in(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("behaviour", "server", "said"),
    [
        ("crash", QWEN, r"vLLM ended with 3: ValueError: no kernel image for \*\*\* \(all of it is in .*qwen-0.log\)"),
        ("well", Server(name="other", model="m"), "expected a server of 'other', it has qwen"),
        ("stranger", QWEN, r"what answers at http://127.0.0.1:\d+ is another server: 401 to our token"),
    ],
)
async def test_servers_that_do_not_start_are_named(tmp_path, behaviour, server, said):
    made = server_of(tmp_path, behaviour, server)
    try:
        with pytest.raises(ServerNotStarted, match=said):
            await made.start()
    finally:
        await made.close()


@pytest.mark.parametrize("often", [1, 2])
@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], ids=["silent", "speaks HTTP"]
)
async def test_a_taken_port_costs_one_more_start(tmp_path: Path, often: int, answer: bytes):
    """The thief ends each connection, or answers /health as a server does but knows no token."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        writer.write(answer if b"/health" in asked else answer.replace(b"200 OK", b"401 Unauthorized"))
        writer.close()

    made = server_of(tmp_path, "well")
    command, ports, thieves = made._command, list[int](), list[asyncio.Task[asyncio.Server]]()

    def stolen(port: int) -> list[str]:
        if len(ports) < often:
            taken = socket.create_server(("127.0.0.1", port))
            thieves.append(asyncio.ensure_future(asyncio.start_server(meet, sock=taken)))
        ports.append(port)
        return command(port)

    made._command = stolen
    try:
        if often == 1:
            assert (await made.start()).endswith(f":{ports[1]}") and ports[0] != ports[1]
        else:
            said = "401 to our token" if answer else r"vLLM ended with 1: OSError: \[Errno 98\] Address already in use"
            with pytest.raises(ServerNotStarted, match=said):
                await made.start()
        assert len(ports) == 2
    finally:
        await made.close()
        for thief in thieves:
            (await thief).close()


LOGGED = "(EngineCore pid=7) ERROR 11-23 21:34:11 [core.py:9] "


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("", ""),
        ("INFO found\nserver: error: unrecognized arguments: --no\n", "server: error: unrecognized arguments: --no"),
        ("(APIServer pid=1) pydantic.ValidationError: 1 error\n(APIServer pid=1)   Value error, too long", "too long"),
        (f"{LOGGED}ValueError: no memory\n(Api pid=1) RuntimeError: Engine core initialization failed.", "no memory"),
        (
            "WARNING 1 2 [cpu.py:608] Failed to import from vllm._C: ImportError('libnuma.so.1: cannot open shared "
            "object file: No such file or directory')\nERROR 1 2 [a.py:1] AttributeError: no attribute 'init'\n"
            "(EngineCore pid=7) Exception: WorkerProc initialization failed due to an exception. See stack trace.",
            "its kernels did not load: libnuma.so.1: cannot open shared object file: No such file or directory "
            "(on Debian: apt install libnuma1); AttributeError: no attribute 'init'",
        ),
        ("(APIServer pid=1) WARNING 1 2 [a.py:1] errors like `OSError: [Errno 24]` may come\nKilled", "Killed"),
    ],
)
def test_the_reason_is_what_failed_first(printed: str, said: str):
    reason = vllm_server._reason(printed)
    assert said in reason and "pid=" not in reason and "Engine core" not in reason and "Errno" not in reason


@pytest.mark.parametrize(
    ("behaviour", "disturb", "said"),
    [
        ("well", signal.SIGSTOP, "vLLM did not answer /health for 60 s"),
        ("dies later", None, "vLLM answers /health with 503"),
        ("well", None, None),
    ],
)
@on_a_moved_clock
async def test_hanging_and_sick_servers_are_lost(tmp_path, monkeypatch, behaviour, disturb, said):
    """Moves the clock past the time-out while the stopped server is asked; a well server is asked five times."""
    for name, seconds in (("_WATCH_S", 0.05), ("_ANSWER_S", PATIENCE), ("_GRACE_S", PATIENCE)):
        monkeypatch.setattr(vllm_server, name, seconds)
    made = server_of(tmp_path, behaviour)
    await made.start()
    health, asked, five_times = made._health, 0, asyncio.Event()

    async def counted() -> int | None:
        nonlocal asked
        asked += 1
        if asked == 5:
            five_times.set()
        if disturb is not None:
            move_clock(PATIENCE)
        return await health()

    monkeypatch.setattr(made, "_health", counted)
    try:
        if disturb is not None:
            os.killpg(made._process.pid, disturb)
        running = asyncio.ensure_future(made.run())
        if said is not None:
            with pytest.raises(RuntimeError, match=said):
                await running
        else:
            await five_times.wait()
            assert not running.done()
        running.cancel()
    finally:
        if disturb is not None:  # `close` waits for the end that SIGTERM asks for
            asyncio.get_running_loop().call_later(0.1, move_clock, PATIENCE)
        await made.close()
    assert not psutil.pid_exists(made._process.pid)


async def test_closing_ends_a_starting_server(tmp_path: Path):
    made = server_of(tmp_path, "silent")
    starting = asyncio.ensure_future(made.start())
    while made._process is None:  # noqa: ASYNC110 (no event reports it)
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait({starting})
    await made.close()
    assert not psutil.pid_exists(made._process.pid)


def test_a_server_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.roles.test_vllm_server import server_of
async def main():
    made = server_of(pathlib.Path({str(tmp_path)!r}), "well")
    await made.start()
    print(made._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        server = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    assert server.wait(timeout=PATIENCE) is None or not server.is_running()


def test_command_and_environment(tmp_path: Path):
    made = VllmServer(server_of(tmp_path, "well")._site, QWEN, tmp_path)
    own = "--model /models/qwen --served-model-name qwen --port 80 --host 127.0.0.1 --uvicorn-log-level warning"
    assert " ".join(made._command(80)[3:]) == f"{own} --max-model-len 1024"
    found = made._environment({"PATH": "/bin"})
    assert (found["PATH"], found["VLLM_API_KEY"], found["HF_HUB_OFFLINE"]) == ("/bin", made._token, "1")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    on_gpu = Server(name="qwen", model="m", resources=Resources(gpus=1))
    assert not any("CPU" in name for name in VllmServer(made._site, on_gpu, tmp_path)._environment({}))


@pytest.mark.parametrize("secret", ["plain", "a+b/c==", "p@ss:w%41", "x?y#z"])
async def test_tokens_of_any_characters(monkeypatch: pytest.MonkeyPatch, secret: str):
    monkeypatch.setenv("JUDGE_TOKEN", secret)
    server = Server(name="given", model="m", replicas=0, urls=("http://a:1",), access="env:JUDGE_TOKEN")
    (address,) = (await KnownAddresses(Reward(servers=(server,)), None)("given")).values()
    assert model_servers._split(address) == ("http://a:1", secret)


@pytest.mark.virtual_time
async def test_known_addresses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_TOKEN", "sesame")
    asked, ready = list[str](), asyncio.Event()

    async def of_run(role: str) -> dict[str, str]:
        asked.append(role)
        await ready.wait()
        return {"both-0": "http://started"}

    elsewhere: dict[str, Any] = {"model": "m", "urls": ("http://a", "http://b"), "access": "env:JUDGE_TOKEN"}
    reward = Reward(servers=(Server(name="both", **elsewhere), Server(name="given", replicas=0, **elsewhere), QWEN))
    given = {"given at http://a": "http://:sesame@a", "given at http://b": "http://:sesame@b"}
    known = KnownAddresses(reward, of_run)
    assert await known("given") == given
    assert [*await known("both")] == ["both at http://a", "both at http://b"], "the run's is not ready"
    waiting = asyncio.gather(*(known("both") for _ in range(3)))
    await asyncio.sleep(0)
    ready.set()
    assert all(found["both-0"] == "http://started" for found in await waiting) and asked == ["both"]
    assert await known("qwen") == {"both-0": "http://started"}
    without = KnownAddresses(reward, None)
    assert await without("given") == given
    with pytest.raises(ScoreError, match="the servers of 'qwen' are started by a run"):
        await without("qwen")


def test_tokens_that_no_header_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_TOKEN", "sesame\n")
    server = Server(name="given", model="m", replicas=0, urls=("http://a",), access="env:JUDGE_TOKEN")
    with pytest.raises(ValueError, match="access of 'given': expected printable ASCII") as caught:
        urls_of(server)
    assert "sesame" not in str(caught.value)
