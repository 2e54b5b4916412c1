"""Tests the Ray shell with a real local Ray: calls that wait do not hold up others, exceptions arrive as themselves,
references travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from omni_async.config import ConfigError
from omni_async.config.section import Resources
from omni_async.media import Media
from omni_async.performance.profile import NOTHING, Profile, ServiceTime, write_profile
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.on_ray import cluster as ray_cluster
from omni_async.runtime.on_ray.cluster import RayCluster
from omni_async.runtime.on_ray.connection import StartError
from omni_async.runtime.on_ray.shell import Proxy, actor_class
from omni_async.runtime.on_ray.store import RayStore
from omni_async.runtime.placement import PlacementPlan
from omni_async.runtime.preflight.check import preflight
from omni_async.types import Prompt, SdeWindow
from omni_async.worker import Worker
from tests.runtime.on_ray import ray_roles
from tests.runtime.runtime_world import write_world
from tests.support.local_ray import local_ray as start_local_ray
from tests.support.patience import PATIENCE, wait_for

ray = pytest.importorskip("ray")
_QUICK = Profile(name="quick", source="a test", generate=ServiceTime(unit_s=1e-6), score=NOTHING, train=NOTHING)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with start_local_ray(4):
        yield


@pytest.fixture
def host(local_ray: None) -> Iterator[Callable[..., Proxy]]:
    """Provides `host(build, long)`, which starts the role in an actor; `long` calls may wait."""
    actors: list[Any] = []

    def start(build: Callable[[], Any], long: str = "next_groups", threads: int = 1) -> Proxy:
        actor = actor_class().options(num_cpus=0).remote(build, threads)
        actors.append(actor)
        return Proxy("role", actor, frozenset({long}))

    yield start
    for actor in actors:
        ray.kill(actor)


async def test_waiting_calls_hold_up_no_others(host):
    waiters = 300  # more than the control door is wide
    meeting = host(ray_roles.Meeting)
    waiting = [asyncio.ensure_future(meeting.next_groups(i, 1)) for i in range(waiters)]
    arrived = 0
    while arrived < waiters:
        arrived = await meeting.announce(0, "")
    async with asyncio.timeout(PATIENCE):
        await meeting._actor.ping.remote()
    assert not any(task.done() for task in waiting)
    await meeting.stop("enough")
    assert await asyncio.gather(*waiting) == list(range(waiters))


async def test_messages_and_exceptions_arrive_as_they_were(host):
    echo = host(ray_roles.Echo, "run")
    message = {"prompt": Prompt(0, "a cat", metadata={"n": 1}), "window": SdeWindow(1, 2), "versions": (1, 2)}
    assert await echo.phase(message) == message
    with pytest.raises(ray_roles.UnsettledError, match="out of balance") as failed:
        await echo.fail("out of balance")
    assert failed.value.count == 3 and type(failed.value) is ray_roles.UnsettledError
    with pytest.raises(ValueError, match=r"^a long call's failure$") as failed_long:
        await echo.run()
    assert type(failed_long.value) is ValueError
    with pytest.raises(Exception, match="the far side: broken"):  # it cannot travel, and its text does
        await echo.require_fields(("broken",))
    with pytest.raises(AttributeError, match="no_such_call"):
        await echo.no_such_call()
    caller = host(partial(ray_roles.Caller, echo))  # a role can be handed another one
    assert await caller.phase("hello") == ["through another", "hello"]
    assert await caller.announce(0, "") == "UnsettledError 3"


async def test_an_actor_sets_its_threads_and_measures_its_start(host):
    role = host(ray_roles.Counter, threads=2)
    assert await role.threads() == 2  # the environment of the tests says 1
    process, build, load = await role._actor.stages.remote(True)
    assert (process.name, build.name, load.name) == ("process", "build", "load")
    assert process.cpu_s > 0 and load.cpu_s > 0  # torch is imported in the last one


async def test_prints_of_a_worker_are_in_its_log(host, tmp_path):
    where = ("tests.runtime.on_ray.ray_roles:loud", Worker("reward", 0), None, tmp_path, {}, "127.0.0.1")
    await host(partial(ray_cluster._build_there, *where)).phase("a scorer")
    assert (tmp_path / "logs" / "reward-0.log").read_text().splitlines() == ["reward-0 prints", "a child prints"]


async def _seconds(answer: Any) -> float:
    return await answer


async def test_a_role_that_cannot_be_built_dies_or_is_stuck(host, tmp_path):
    with pytest.raises(Exception, match="no model at this path"):
        await host(ray_roles.Unbuildable).phase("hello")
    dying, stuck = host(ray_roles.Echo), host(ray_roles.Echo)
    await dying.phase("alive")
    with pytest.raises(PeerLost, match="role is gone"):
        await dying.stop("now")
    await stuck.phase("alive")
    holding = asyncio.ensure_future(stuck.announce(0, str(tmp_path)))
    await asyncio.to_thread(wait_for, (tmp_path / "held").exists, "a held request")
    ping = asyncio.ensure_future(_seconds(stuck._actor.ping.remote()))
    assert not (await asyncio.wait({ping}, timeout=0.5))[0]
    (tmp_path / "free").touch()
    await asyncio.gather(ping, holding)


async def test_the_store_gives_back_values_as_they_were(local_ray):
    trajectory = TensorDict(
        {
            "latents": torch.randn(3, 6, 4),
            "none": torch.zeros(0, 3, dtype=torch.int64),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "transposed": torch.arange(6.0).reshape(2, 3).T,
            "conditioning": {"mask": torch.ones(2, dtype=torch.bool), "embeds": torch.randn(2, 3).bfloat16()},
        }
    )
    store = RayStore()
    back = await store.get(await store.put(trajectory))
    assert back.batch_size == torch.Size([])
    given, found = (dict(one.items(include_nested=True, leaves_only=True)) for one in (trajectory, back))
    assert given.keys() == found.keys()
    for key, tensor in given.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert torch.equal(await store.get(await store.put(torch.ones(3))), torch.ones(3))
    values = [{"a": 1}, "text", Prompt(3, "a cat"), None]
    assert [await store.get(reference) for reference in await store.put_all(values)] == values

    video = np.random.default_rng(0).integers(0, 256, (9, 3, 32, 48), dtype=np.uint8)
    media = Media(video=video, fps=12.5, audio=np.ones((2, 100), np.float32), sample_rate=8000)
    one, other = await store.put_all([media, Media(image=video[0])])
    assert one.object == other.object  # small values share an object
    for _ in range(2):  # reading takes nothing away
        back = await store.get(one)
        assert back.parts == ("video", "audio") and (back.fps, back.sample_rate) == (12.5, 8000)
        assert np.array_equal(back.video, video) and np.array_equal(back.audio, media.audio)
        assert not back.video.flags.writeable and not back.video.flags.owndata  # no copy
    assert np.array_equal((await store.get(other)).image, video[0])


async def test_references_travel_and_die_with_their_owner(host):
    store, keeper = RayStore(), host(partial(ray_roles.Keeper, RayStore()))
    mine = await store.put(np.arange(3))
    answer = await keeper.phase([mine])
    gone = answer["reference"]
    assert answer["value"].tolist() == (await store.get(gone)).tolist() == [0, 1, 2]
    ray.kill(keeper._actor)
    with pytest.raises(LookupError):
        async with asyncio.timeout(PATIENCE):
            while True:  # until its death is known
                await store.get(gone)
    lost, kept, again = await asyncio.gather(store.get(gone), store.get(mine), store.get(gone), return_exceptions=True)
    assert isinstance(lost, LookupError) and isinstance(again, LookupError)
    assert f"object {gone.object.hex()} is gone" in str(lost)
    assert kept.tolist() == [0, 1, 2]


async def test_large_values_have_their_own_objects(local_ray):
    store = RayStore()
    small = [np.full(1000, number, np.uint8) for number in range(5)]
    references = await store.put_all(small)
    assert len({reference.object for reference in references}) == 1
    large = [np.full(9 * 2**20, 7, np.uint8), np.full(10, 8, np.uint8), np.full(9 * 2**20, 9, np.uint8)]
    references += await store.put_all(large)
    assert len({reference.object for reference in references[5:]}) == 3
    back = await asyncio.gather(*(store.get(reference) for reference in reversed(references)))
    assert [len(value) for value in reversed(back)] == [1000] * 5 + [9 * 2**20, 10, 9 * 2**20]
    assert all(np.array_equal(value, given) for value, given in zip(reversed(back), small + large, strict=True))
    assert await store.put_all([]) == []


def make_cluster(folder: Path, name: str = "run-1", **sections: Any) -> RayCluster:
    inputs = preflight(write_world(folder, run={"runtime": "ray"}, **sections))
    return RayCluster(inputs, RunDirectory(folder / name))


async def test_a_job_that_does_not_fit(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_PLACEMENT_TIMEOUT_S", 0.2)
    cluster, told = make_cluster(tmp_path), list[str]()
    cluster.tell = told.append
    cluster._placements = PlacementPlan((Resources(cpus=500), Resources(cpus=12)), {})
    with pytest.raises(StartError, match="placement: the run needs 512 CPUs and 0 GPUs, the cluster has 4 and"):
        await cluster._reserve()
    assert told == ["reserving 512 CPUs of the cluster (up to 0.2 s)"]
    ray.util.remove_placement_group(cluster._group)
    # A Ray of this machine alone is not waited for to grow.
    monkeypatch.setattr(ray_cluster, "placement_group", lambda *_, **__: pytest.fail("nothing is reserved"))
    monkeypatch.setattr(RayCluster, "_has_own_ray", True)
    for asked, error, said in (
        (Resources(cpus=99), StartError, "the run needs 99 CPUs and 0 GPUs, the cluster has 4 and"),
        (Resources(cpus=1, gpus=2), ConfigError, "the run asks for 2 GPUs, and the Ray cluster has no accelerators"),
    ):
        cluster._placements = PlacementPlan((asked,), {})
        with pytest.raises(error, match=said):
            await cluster._reserve()


def test_a_ray_of_others_is_left_running(local_ray, tmp_path):
    """Runs two jobs one after the other: neither leaves an actor or a placement group behind."""
    write_profile(tmp_path / "profile.json", _QUICK)

    async def main(name: str) -> None:
        (tmp_path / name).mkdir()
        cluster = make_cluster(tmp_path, name, emulation={"profile": "profile.json"}, trainer={"updates": 1})
        try:
            await cluster.connect()
            await cluster.start()
            services = [asyncio.ensure_future(work) for work in cluster.services().values()]
            await asyncio.gather(*cluster.work().values(), *cluster.workers().values())
            assert "ended" in [event.kind for event in await cluster.coordinator.events()]
            for service in services:
                service.cancel()
            await asyncio.gather(*services, return_exceptions=True)
        finally:
            await cluster.close()
        assert ray.is_initialized()
        with pytest.raises(ValueError, match="Failed to look up actor"):
            ray.get_actor(f"{name}/1/trainer")

    asyncio.run(make_cluster(tmp_path).close())  # of one that never started
    for name in ("run-2", "run-3"):
        asyncio.run(main(name))
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


async def test_roles_that_share_devices_fit_into_their_bundles(local_ray, tmp_path):
    """Requires that Ray grants every share that `placements` gives out."""
    placement = {"colocated": True, "rollout": {"cpus": 1}, "reward": {"cpus": 1}, "trainer": {"cpus": 1}}
    cluster = make_cluster(tmp_path, placement=placement, staleness={"max_updates": 0})

    await cluster._reserve()
    proxies = [cluster._host(Worker.parse(slot), ray_roles.Echo) for slot in cluster._placements.actors]
    assert await asyncio.gather(*(proxy.phase("here") for proxy in proxies)) == ["here"] * 4
    await cluster.close()
