"""Tests with a Ray of invented Ascend accelerators: what is asked of it, and that a recipe for others is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_ray import local_ray as start_local_ray
from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.preflight.check import preflight
from omni_async.worker import Worker
from tests.runtime.on_ray.ray_roles import Echo
from tests.runtime.runtime_world import write_world

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def two_npus() -> Iterator[None]:
    with start_local_ray(4, resources={"NPU": 2}):
        yield


def make_cluster(folder: Path, **placement: Any) -> RayCluster:
    each = {"cpus": 0.5, "gpus": 1}
    placement = {"rollout": each, "trainer": each, "reward": {"cpus": 0.5}} | placement
    config = write_world(folder, run={"runtime": "ray"}, placement=placement)
    return RayCluster(preflight(config), RunDirectory(folder / "run-1"))


async def test_bundles_ask_for_the_kind_that_the_cluster_has(tmp_path: Path) -> None:
    """Which devices an actor sees is tested in test_ray_devices.py."""
    cluster = make_cluster(tmp_path, accelerator="auto")
    await cluster._reserve()
    assert cluster._group is not None
    engine = {"CPU": 0.5, "NPU": 1.0}
    assert cluster._group.bundle_specs == [{"CPU": 0.01}, engine, {"CPU": 0.5}, engine]
    assert await cluster._host(Worker("trainer"), Echo).phase("here") == "here"
    await cluster.close()


async def test_a_kind_that_the_cluster_lacks(tmp_path, capsys) -> None:
    cluster = make_cluster(tmp_path, accelerator="GPU")
    said = r"placement.accelerator: the run asks for 2 GPUs, and the Ray cluster has 2 NPUs; set it to what the"
    with pytest.raises(ConfigError, match=said):
        await cluster._reserve()
    assert cluster._group is None
    assert await asyncio.to_thread(main, ["train", str(tmp_path / "recipe.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("omni-async: placement.accelerator: the run asks for 2 GPUs") and error.count("\n") == 1
