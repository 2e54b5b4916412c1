"""Tests which devices roles ask for and their processes and children see, on a Ray with invented GPUs and NPUs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.preflight.check import preflight
from omni_async.worker import Worker
from tests.runtime.on_ray.ray_roles import Echo
from tests.runtime.runtime_world import write_package, write_world
from tests.support.local_ray import local_ray as start_local_ray

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

VARIABLES = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}
ROLES = ("coordinator", "rollout-0", "reward-0", "trainer", "judge-0", "busy-0", "counter-0")


@pytest.fixture(scope="module")
def six_of_each() -> Iterator[None]:
    """Its owner keeps Ray from setting CUDA's variable, and leaves it Ascend's."""
    with start_local_ray(8, gpus=6, resources={"NPU": 6}, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1"):
        yield


class Seer:
    """A role that reports which devices it was given, sees, and shows a child."""

    async def phase(self, kind: str) -> dict[str, Any]:
        show = f"import os; print({{name: os.environ.get(name) for name in {[*VARIABLES.values()]}}})"
        child = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", show], capture_output=True, text=True)
        return {
            "given": ray.get_runtime_context().get_accelerator_ids()[kind],
            "sees": {name: os.environ.get(name) for name in VARIABLES.values()},
            "child": child.stdout.strip(),
        }

    async def announce(self, version: int, digest: str) -> list[str]:
        """Returns the devices that a trainer rank and the scorers of this process would use, on a pretended Ascend."""
        from tests.support.pretend_npu import pretend

        pretend(len(os.environ["ASCEND_RT_VISIBLE_DEVICES"].split(",")))
        from omni_async.accelerator import require_accelerator, visible_devices
        from omni_async.training.device import rank_device

        kind, seen = visible_devices()
        return [str(rank_device(version)), str(require_accelerator("a key", 1)), kind, *seen]


def make_cluster(folder: Path, kind: str, gpus: float) -> RayCluster:
    """Makes a job with a worker of every role that can have devices, `gpus` each; `counter` is another package's."""
    each = {"cpus": 0.5, "gpus": gpus}
    write_package(folder, "outside", "omni_async.roles", counter="tests.runtime.outside_role:ROLE")
    reward = {
        "scorers": [{"name": "jpeg_size", "pool": "busy"}],
        "pools": [{"name": "busy", "resources": each}],
        "servers": [{"name": "judge", "model": "model", "resources": each}],
    }
    placement = {"rollout": each, "trainer": each, "reward": each, "accelerator": kind}
    roles = [{"name": "counter", "resources": each}]
    config = write_world(folder, run={"runtime": "ray"}, placement=placement, reward=reward, roles=roles)
    return RayCluster(preflight(config), RunDirectory(folder / f"{kind}-{gpus}"))


async def test_the_kind_of_the_cluster(tmp_path, capsys):
    """A recipe asks for the kind that the cluster has, or is refused in one line."""

    def cluster_for(kind: str) -> RayCluster:
        each = {"cpus": 0.5, "gpus": 1}
        placement = {"rollout": each, "trainer": each, "reward": {"cpus": 0.5}, "accelerator": kind}
        config = write_world(tmp_path, run={"runtime": "ray"}, placement=placement)
        return RayCluster(preflight(config), RunDirectory(tmp_path / kind))

    with start_local_ray(4, resources={"NPU": 2}):
        cluster = cluster_for("auto")
        await cluster._reserve()
        assert cluster._group is not None
        engine = {"CPU": 0.5, "NPU": 1.0}
        assert cluster._group.bundle_specs == [{"CPU": 0.01}, engine, {"CPU": 0.5}, engine]
        assert await cluster._host(Worker("trainer"), Echo).phase("here") == "here"
        await cluster.close()
        cluster = cluster_for("GPU")
        said = "placement.accelerator: the run asks for 2 GPUs, and the Ray cluster has 2 NPUs"
        with pytest.raises(ConfigError, match=f"{said}; set it to what the"):
            await cluster._reserve()
        assert cluster._group is None
        capsys.readouterr()  # of Ray's start
        assert await asyncio.to_thread(main, ["train", str(tmp_path / "recipe.yaml")]) == 2
        error = capsys.readouterr().err
    assert error.startswith(f"omni-async: {said}") and error.count("\n") == 1


_NVML = """
from types import SimpleNamespace
nvmlInit = lambda: None
nvmlDeviceGetHandleByIndex = int
nvmlDeviceGetUUID = "GPU-{}".format
nvmlDeviceGetName = lambda handle: "NVIDIA H100"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=2**30, total=2**36)
nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=50)
"""


@pytest.mark.thorough
async def test_workers_report_their_devices_as_they_are_asked_for_their_health(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(_NVML)
    monkeypatch.syspath_prepend(tmp_path)
    each = {"cpus": 0.5, "gpus": 1}
    placement = {"rollout": each, "trainer": each, "reward": {"cpus": 0.5}, "accelerator": "GPU"}
    config = write_world(tmp_path, run={"runtime": "ray"}, placement=placement)
    with start_local_ray(4, gpus=2):
        cluster = RayCluster(preflight(config), RunDirectory(tmp_path / "run"))
        await cluster._reserve()
        names = ("coordinator", "trainer", "rollout-0")
        for name in names:
            cluster._host(Worker.parse(name), Echo)
            await cluster._locate(name)

        async def sampled() -> bool:
            await asyncio.gather(*map(cluster._check, names))
            return len(cluster.sampled()) == 2

        while not await sampled():
            pass
        nodes = {cluster._where[name].node for name in names}
        found = {name: (node, devices) for name, node, devices in cluster.sampled()}
        assert {*found} == {"trainer", "rollout-0"} and {node for node, _ in found.values()} == nodes
        (one,), (other,) = (devices for _, devices in found.values())
        assert {one.id, other.id} == {"GPU-0", "GPU-1"}
        assert (one.name, one.memory_bytes, one.total_bytes, one.utilisation) == ("NVIDIA H100", 2**30, 2**36, 0.5)
        await cluster._end("trainer")
        assert [name for name, _, _ in cluster.sampled()] == ["rollout-0"]
        await cluster.close()


@pytest.mark.thorough
@pytest.mark.usefixtures("six_of_each")
@pytest.mark.parametrize("kind", ["GPU", "NPU"])
@pytest.mark.parametrize("gpus", [0, 0.5, 1])
async def test_roles_and_their_children_see_their_own_devices(tmp_path, monkeypatch, kind, gpus):
    monkeypatch.syspath_prepend(tmp_path)
    cluster = make_cluster(tmp_path, kind, gpus)
    try:
        await cluster._reserve()
        assert {*cluster._placements.actors} == {*ROLES}
        proxies = {slot: cluster._host(Worker.parse(slot), Seer) for slot in ROLES}
        answers = await asyncio.gather(*(proxy.phase(kind) for proxy in proxies.values()))
        found = dict(zip(ROLES, answers, strict=True))
        for role, seen in found.items():
            assert len(seen["given"]) == (0 if role == "coordinator" or gpus == 0 else 1), role
            assert seen["sees"] == {**dict.fromkeys(VARIABLES.values(), ""), VARIABLES[kind]: "".join(seen["given"])}
            assert seen["child"] == str(seen["sees"])
        held = {one for seen in found.values() for one in seen["given"]}
        assert len(held) == 6 * gpus, "two halves share a device, and nobody shares a whole one"
        if kind == "NPU" and gpus:
            mine = found["trainer"]["given"][0]
            assert await proxies["trainer"].announce(3, "") == ["npu:0", "npu", "NPU", mine]
    finally:
        await cluster.close()
