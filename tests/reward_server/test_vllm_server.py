"""Tests the service around a vLLM server, with a process that behaves as one; tests/e2e has the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_async.config.stages import Resources, Reward, Server
from omni_async.reward_server.vllm_server import ServerNotStarted, VllmServer
from omni_async.rewards.addresses import KnownAddresses
from omni_async.rewards.base import ScoreError
from omni_async.services import ServiceSite

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_vllm.py")
QWEN = Server(name="qwen", model="/models/qwen", args=("--max-model-len", "1024"))


def server_of(folder: Path, behaviour: str, server: Server = QWEN) -> VllmServer:
    async def tell(text: str) -> None: ...

    async def addresses(role: str) -> dict[str, str]:
        return {}

    site = ServiceSite("qwen-0", 0, None, None, "127.0.0.1", tell, addresses)
    made = VllmServer(site, server, folder / "servers")
    made._command = lambda port: [sys.executable, str(FAKE), behaviour, str(port)]  # type: ignore[method-assign]
    return made


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def test_a_server_is_ready_when_it_has_the_model_and_is_lost_when_its_process_is(tmp_path: Path) -> None:
    made = server_of(tmp_path, "well")
    address = await made.start()
    try:
        assert address.startswith("http://:") and address.count("@127.0.0.1:") == 1
        assert made._process is not None
        assert made._token not in " ".join(psutil.Process(made._process.pid).cmdline())
        running = asyncio.ensure_future(made.run())
        await asyncio.sleep(0.1)
        assert not running.done()
        os.killpg(made._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="vLLM ended with -9: nothing was printed"):
            await running
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("behaviour", "server", "said"),
    [
        ("crash", QWEN, r"vLLM ended with 3: ValueError: no kernel image for \*\*\* \(all of it is in .*qwen-0.log\)"),
        ("well", Server(name="other", model="m"), "expected a server of 'other', it has qwen"),
    ],
)
async def test_one_that_does_not_start_or_has_another_model_is_named(tmp_path, behaviour, server, said) -> None:
    made = server_of(tmp_path, behaviour, server)
    try:
        with pytest.raises(ServerNotStarted, match=said):
            await made.start()
    finally:
        await made.close()


async def test_closing_ends_a_server_that_is_still_starting(tmp_path: Path) -> None:
    made = server_of(tmp_path, "silent")
    starting = asyncio.ensure_future(made.start())
    while made._process is None:  # noqa: ASYNC110 (the service does not say when it has one)
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait({starting})
    await made.close()
    assert not psutil.pid_exists(made._process.pid)


def test_a_server_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.reward_server.test_vllm_server import server_of
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
    assert server.wait(timeout=20) is None or not server.is_running()


def test_what_vllm_is_given(tmp_path: Path) -> None:
    made = VllmServer(server_of(tmp_path, "well")._site, QWEN, tmp_path)
    assert made._command(80)[1:3] == ["-m", "omni_async.reward_server.vllm_process"]
    own = "--model /models/qwen --served-model-name qwen --port 80 --host 127.0.0.1 --max-model-len 1024"
    assert " ".join(made._command(80)[3:]) == own
    found = made._environment({"PATH": "/bin"})
    assert (found["PATH"], found["VLLM_API_KEY"], found["HF_HUB_OFFLINE"]) == ("/bin", made._token, "1")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    on_gpu = Server(name="qwen", model="m", resources=Resources(gpus=1))
    assert not any("CPU" in name for name in VllmServer(made._site, on_gpu, tmp_path)._environment({}))


async def test_addresses_of_a_recipe_are_known_beside_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "sesame")
    ready = asyncio.Event()

    async def of_run(role: str) -> dict[str, str]:
        await ready.wait()
        return {"both-0": "http://started"}

    elsewhere: dict[str, Any] = {"model": "m", "urls": ("http://a", "http://b"), "access": "env:JUDGE_TOKEN"}
    reward = Reward(servers=(Server(name="both", **elsewhere), Server(name="given", replicas=0, **elsewhere), QWEN))
    given = {"given at http://a": "http://:sesame@a", "given at http://b": "http://:sesame@b"}
    known = KnownAddresses(reward, of_run)
    assert await known("given") == given
    assert [*await known("both")] == ["both at http://a", "both at http://b"], "the run's is not ready"
    ready.set()
    assert (await known("both"))["both-0"] == "http://started" and await known("qwen") == {"both-0": "http://started"}
    without = KnownAddresses(reward, None)
    assert await without("given") == given
    with pytest.raises(ScoreError, match="the servers of 'qwen' are started by a run"):
        await without("qwen")
