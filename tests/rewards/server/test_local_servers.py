"""Tests judge servers without a run, with processes that behave as vLLM does; tests/e2e has the real one."""

import asyncio
import os
import signal
import sys

import psutil
import pytest
import torch

from omni_async.commands.scoring.local_servers import local_servers
from omni_async.config import ConfigError
from omni_async.config.reward import Reward, Scorer, Server
from omni_async.config.section import Resources
from omni_async.rewards.base import ScoreError
from omni_async.roles.vllm_server import VllmServer
from tests.roles.test_vllm_server import FAKE, ROOT

JUDGE = Scorer(name="vlm_judge", params={"server": "qwen", "model": "qwen"})


async def silent(text): ...


@pytest.fixture(autouse=True)
def behaviour(monkeypatch, tmp_path):
    """A file with what the next server that starts will do."""
    file = tmp_path / "behaviour"
    file.write_text("well")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command = lambda self, port: [sys.executable, str(FAKE), file.read_text(), str(port)]  # noqa: E731
    monkeypatch.setattr(VllmServer, "_command", command)
    return file


def reward(folder, **server):
    given = Server(name="qwen", model=str(folder), **server)
    return Reward(scorers=(JUDGE,), servers=(given, Server(name="unasked", model=str(folder))))


async def test_servers_that_scorers_ask_are_started_again_when_lost_until_they_do_not_come_back(tmp_path, behaviour):
    told = []

    async def tell(text):
        told.append(text)

    async with local_servers(reward(tmp_path, replicas=2), 60, tell) as addresses:
        first = await addresses("qwen")
        assert sorted(first) == ["qwen-0", "qwen-1"] and len({*first.values()}) == 2
        with pytest.raises(ScoreError, match="'other' is started by a run"):
            await addresses("other")
        running = addresses.__self__._running
        async with asyncio.timeout(60):
            os.killpg(running["qwen-0"]._process.pid, signal.SIGKILL)
            while (await addresses("qwen")).get("qwen-0") in (None, first["qwen-0"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.to_thread(behaviour.write_text, "crash")
            for one in running.values():
                os.killpg(one._process.pid, signal.SIGKILL)
            with pytest.raises(ScoreError, match="no server of 'qwen' is left"):
                while True:
                    await addresses("qwen")
                    await asyncio.sleep(0.05)
        processes, logs = [one._process for one in running.values()], [one._log for one in running.values()]
    assert all(process.returncode is not None for process in processes)
    assert any("qwen-0 is started again: vLLM ended with -9" in line for line in told)
    assert sum("does not come back: vLLM ended with 3: ValueError" in line for line in told) == 2
    assert all(log.parent.name.startswith("omni-async-servers-") and log.stat().st_size for log in logs)


@pytest.mark.parametrize(
    ("does", "given", "said"),
    [
        ("crash", {}, "reward.servers: vLLM ended with 3: ValueError: no kernel image"),
        ("silent", {}, "reward.servers: qwen-0 not ready within 2 s"),
        (
            "well",
            {"resources": Resources(gpus=1), "replicas": 2},
            "resources.gpus of 'qwen': the servers need 2 accelerators, torch sees 0 here; lower resources.gpus",
        ),
        ("well", {}, "resources.gpus of 'qwen': 0 is the CPU, and the installed vLLM 0.30.0 runs on accelerators"),
    ],
)
async def test_a_server_that_cannot_be_started_is_named(tmp_path, behaviour, monkeypatch, does, given, said):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    of_cuda = "0.30.0" if "runs on accelerators" in said else None
    monkeypatch.setattr("omni_async.commands.scoring.local_servers.vllm_without_cpus", lambda: of_cuda)
    await asyncio.to_thread(behaviour.write_text, does)
    with pytest.raises(ConfigError, match=said):
        async with local_servers(reward(tmp_path, **given), 2 if does == "silent" else 60, silent):
            raise AssertionError("it started")


@pytest.mark.parametrize(
    ("gpus", "visible", "devices"),
    [(0, None, ["", ""]), (1, None, ["0", "1"]), (0.5, "4,6,7", ["4", "6"]), (2, "4,5,6,7", ["4,5", "6,7"])],
)
async def test_replicas_see_devices_of_their_own_and_none_without_gpus(tmp_path, monkeypatch, gpus, visible, devices):
    """The device of the fake is `meta`: torch has no other here."""
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("meta"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = reward(tmp_path, replicas=2, resources=Resources(gpus=gpus))
    async with local_servers(given, 60, silent) as addresses:
        running = addresses.__self__._running.values()
        children = [psutil.Process(one._process.pid).environ() for one in running]
    assert sorted(child["CUDA_VISIBLE_DEVICES"] for child in children) == devices
    assert [child["ASCEND_RT_VISIBLE_DEVICES"] for child in children] == ["", ""]


async def test_nothing_is_started_where_nobody_asks_or_others_are_there(tmp_path):
    there = reward(tmp_path, replicas=0, urls=("http://a",))
    for given in (there, Reward(scorers=(Scorer(name="jpeg_size"),), servers=there.servers)):
        async with local_servers(given, 60, silent) as addresses:
            assert addresses is None
