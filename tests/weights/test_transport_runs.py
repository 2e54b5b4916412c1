"""Tests whole runs by every transport, and how a full disk ends one."""

import errno

import pytest
import torch
from safetensors.torch import load_file

from omni_async.weights.digest import Bucket
from omni_async.weights.transport.disk import VersionFile
from tests.support.configs import write_recipe_file
from tests.support.job_world import Run, run, write_recipe


def assert_file_is_what_was_trained(finished: Run) -> None:
    [file] = (finished.path / "weights").iterdir()
    assert file.name == "version-000003.safetensors"
    published, trained = load_file(file), finished.weights()
    assert published.keys() == trained.keys()
    assert all(torch.equal(published[name], trained[name]) for name in trained)


def assert_both_engines_swapped(finished: Run) -> None:
    assert (finished.summary.status, finished.summary.updates) == ("done", 3), finished.summary.reason
    held = {(e["args"].get("version"), e["pid"]) for e in finished.trace if e["ph"] == "X" and e["name"] == "swap"}
    assert {version for version, _ in held} >= {0, 3} and len({engine for _, engine in held}) == 2


def test_the_last_version_stays_as_a_file_and_is_what_was_trained(tmp_path, checkpoint):
    finished = run(write_recipe(tmp_path, checkpoint), "weights.transport=disk", "staleness.max_updates=2")
    assert finished.summary.status == "done"
    assert_file_is_what_was_trained(finished)


def test_a_full_disk_ends_the_run_with_the_reason_and_a_checkpoint(tmp_path, checkpoint, monkeypatch):
    write = VersionFile.write

    def fails_at_2(file: VersionFile, bucket: Bucket) -> None:
        if file.version == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, bucket)

    monkeypatch.setattr(VersionFile, "write", fails_at_2)
    failed = run(write_recipe(tmp_path, checkpoint), "weights.transport=disk")
    assert failed.summary.status == "failed"
    said = "TransportError: weights.transport: disk: version 2 cannot be written to "
    assert failed.summary.reason.startswith(said)
    assert failed.summary.reason.endswith("version-000002.safetensors: No space left on device")
    assert [path.name for path in sorted((failed.path / "checkpoints").iterdir())] == ["update-000002"]


_EMULATED = {
    "run": {"name": "transport", "runtime": "ray"},
    "model": {"path": "none"},
    "data": {},
    "rollout": {
        "workers": 2,
        "group_size": 4,
        "num_inference_steps": 4,
        "sde": {"window": {"size": 2, "range": [0, 3]}},
    },
    "trainer": {"updates": 3, "groups_per_update": 2},
    "algorithm": {"clip_range": 0.1},
    "tracking": {"mlflow": {"enabled": False}},
    "emulation": {"profile": "qwen_image_lora_h800", "time_scale": 1e-4, "payload_scale": 1e-3},
}


# Other runs on Ray publish by the object store.
_LEFT = {"object_store": [], "disk": ["version-000003.safetensors"], "collective": []}


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray")
    from tests.support.local_ray import local_ray

    with local_ray(4, 200_000_000, OMP_NUM_THREADS="1"):
        yield


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("transport", [pytest.param("object_store", marks=pytest.mark.thorough), "disk", "collective"])
def test_runs_on_ray_publish_by_every_transport(transport, ray, tmp_path):
    recipe = write_recipe_file(tmp_path / "recipe.yaml", _EMULATED, {})
    finished = run(recipe, f"weights.transport={transport}")
    assert_both_engines_swapped(finished)
    assert [path.name for path in (finished.path / "weights").glob("*")] == _LEFT[transport]


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["object_store", "disk", "collective"])
def test_two_ranks_on_ray_publish_their_rows(tmp_path, checkpoint, transport, ray):
    halves = ("placement.trainer.cpus=0.5", "placement.reward.cpus=0.5")
    ranks = ("run.runtime=ray", "trainer.workers=2", "rollout.workers=2", *halves)
    recipe = write_recipe(tmp_path, checkpoint)
    finished = run(recipe, *ranks, "weights.bucket_mb=1", f"weights.transport={transport}")
    assert_both_engines_swapped(finished)
    if transport == "disk":
        assert_file_is_what_was_trained(finished)
