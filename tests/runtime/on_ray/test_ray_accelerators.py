"""Tests with a Ray that is said to have Ascend accelerators: what is asked of it, what an actor sees of them, and what
a recipe is told that asks for others."""

from __future__ import annotations

import asyncio
import os
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
from tests.runtime.runtime_world import write_world
from tests.support.local_ray import local_ray as start_local_ray

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def two_npus() -> Iterator[None]:
    with start_local_ray(4, resources={"NPU": 2}):
        yield


class Seer:
    """A role that says which accelerators it was given."""

    async def phase(self, text: str) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "given": context.get_accelerator_ids()["NPU"],
            "visible": os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
            "others": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "resources": context.get_assigned_resources(),
        }


def make_cluster(folder: Path, **placement: Any) -> RayCluster:
    each = {"cpus": 0.5, "gpus": 1}
    placement = {"rollout": each, "trainer": each, "reward": {"cpus": 0.5}} | placement
    config = write_world(folder, run={"runtime": "ray"}, placement=placement)
    return RayCluster(preflight(config), RunDirectory(folder / "run-1"))


@pytest.mark.parametrize("accelerator", ["auto", "NPU"])
async def test_bundles_and_actors_ask_for_the_kind_that_the_cluster_has(tmp_path: Path, accelerator: str) -> None:
    cluster = make_cluster(tmp_path, accelerator=accelerator)

    await cluster._reserve()
    assert cluster._group is not None
    engine = {"CPU": 0.5, "NPU": 1.0}
    assert cluster._group.bundle_specs == [{"CPU": 0.01}, engine, {"CPU": 0.5}, engine]
    slots = ("rollout-0", "reward-0", "trainer")
    proxies = [cluster._host(Worker.parse(slot), Seer) for slot in slots]
    engine, scorer, trainer = await asyncio.gather(*(proxy.phase("") for proxy in proxies))
    assert sorted(engine["given"] + trainer["given"]) == ["0", "1"] and scorer["given"] == []
    assert (engine["visible"], trainer["visible"]) == (engine["given"][0], trainer["given"][0])
    assert scorer["visible"] == "", "an actor without accelerators sees none"
    assert [one["others"] for one in (engine, scorer, trainer)] == [""] * 3
    assert engine["resources"]["NPU"] == 1 and "GPU" not in engine["resources"]
    await cluster.close()


async def test_a_kind_that_the_cluster_lacks_is_refused_at_once_by_the_command_in_one_line(tmp_path, capsys) -> None:
    cluster = make_cluster(tmp_path, accelerator="GPU")
    said = r"placement.accelerator: the run asks for 2 GPUs, and the Ray cluster has 2 NPUs; set it to what the"
    with pytest.raises(ConfigError, match=said):
        await cluster._reserve()
    assert cluster._group is None
    assert await asyncio.to_thread(main, ["train", str(tmp_path / "recipe.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("omni-async: placement.accelerator: the run asks for 2 GPUs") and error.count("\n") == 1
