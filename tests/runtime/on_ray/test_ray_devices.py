"""Tests which devices each role's process, and its children, see on a Ray with invented GPUs and Ascend NPUs.

The cluster is one whose owner keeps Ray from setting CUDA's variable, and leaves it Ascend's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.preflight.check import preflight
from omni_async.worker import Worker
from tests.runtime.runtime_world import write_world
from tests.support.local_ray import local_ray as start_local_ray

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(240)]

VARIABLES = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}
ROLES = ("coordinator", "rollout-0", "reward-0", "trainer", "judge-0", "busy-0", "counter-0")


@pytest.fixture(scope="module", autouse=True)
def six_of_each() -> Iterator[None]:
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
    points = folder / "outside-1.0.dist-info" / "entry_points.txt"
    points.parent.mkdir()
    points.write_text("[omni_async.roles]\ncounter = tests.runtime.outside_role:ROLE\n")
    reward = {
        "scorers": [{"name": "jpeg_size", "pool": "busy"}],
        "pools": [{"name": "busy", "resources": each}],
        "servers": [{"name": "judge", "model": "model", "resources": each}],
    }
    placement = {"rollout": each, "trainer": each, "reward": each, "accelerator": kind}
    roles = [{"name": "counter", "resources": each}]
    config = write_world(folder, run={"runtime": "ray"}, placement=placement, reward=reward, roles=roles)
    return RayCluster(preflight(config), RunDirectory(folder / f"{kind}-{gpus}"))


@pytest.mark.parametrize("kind", ["GPU", "NPU"])
@pytest.mark.parametrize("gpus", [0, 0.5, 1])
async def test_every_role_and_its_children_see_the_devices_that_it_was_given_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, gpus: float
) -> None:
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
