"""Tests the real thing, as a user starts it: Ray actors, vLLM-Omni, gloo ranks; one run with everything switched on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image

from omni_async.checkpoint import read_state, require_whole
from omni_async.records.write.catalogue import find
from tests.support.job_world import command_line, left_behind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def test_everything_switched_on(recipe: Path) -> None:
    """Runs S = 2 with two engines and two trainer ranks, and checks its ledger, metrics, images and checkpoint."""
    folder = recipe.parent
    (folder / "held_out.txt").write_text("a blue digit\nthe digit 9\n")
    overrides = (
        *("run.runtime=ray", "rollout.engine=vllm_omni", "rollout.workers=2", "trainer.workers=2"),
        *("staleness.max_updates=2", "trainer.updates=6", "rollout.max_inflight=4", "rollout.num_inference_steps=8"),
        *("rollout.sde.window.range=[0, 6]", "tracking.mlflow.enabled=true", "tracking.images_every=3"),
        f"validation={{every: 3, prompts: {folder / 'held_out.txt'}, num_inference_steps: 4}}",
    )
    answer = command_line(recipe, *overrides, timeout=240)
    assert (answer.code, answer.stderr) == (0, ""), answer
    updates = [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("update ")]
    assert updates == [f"{n}/6" for n in range(1, 7)]
    asynchronous = left_behind(recipe, overrides).check_every_group_ended_once()
    assert asynchronous.summary.updates == 6 and 0 < asynchronous.summary.staleness_max <= 2
    assert len({line["staleness"] for line in asynchronous.ledger}) > 1, "the first update is fresh, later ones are not"
    assert 0 < asynchronous.summary.peak_memory_bytes < 8 * 2**30
    roles = {"driver", "ray", "coordinator", "rollout", "reward", "trainer"}
    assert asynchronous.summary.cpu_s.keys() == roles and min(asynchronous.summary.cpu_s.values()) > 0
    assert asynchronous.summary.overlap_fraction > 0
    assert asynchronous.actors >= {"rollout-0", "rollout-1", "reward-0", "trainer", "publisher"}
    kinds = {event["name"] for event in asynchronous.trace if event["ph"] == "X"}
    assert kinds >= {"generate", "score", "train", "publish", "stage", "swap", "export", "checkpoint"}

    assert [line["update"] for line in asynchronous.metrics] == list(range(1, 7))
    for line in asynchronous.metrics:
        assert line["conservation"]["admitted"] >= line["conservation"]["trained"] == 2 * line["update"]
    names = {name for line in [*asynchronous.metrics, *asynchronous.validation] for name in line}
    undocumented = "finished conservation samples standard_error asked drawn reasons scores"
    assert {name for name in names if find(name)[0] is None} == {*undocumented.split()}
    versions = [point.version for point in asynchronous.summary.validation]
    assert versions[0] == 0 and versions[-1] == 6
    images = {path.stem: Image.open(path) for path in (asynchronous.path / "samples").glob("*.png")}
    assert {"train-000001", "train-000003", "train-000006", "validation-000000", "validation-000006"} <= images.keys()
    for image in images.values():
        image.load()

    client = MlflowClient(tracking_uri=f"sqlite:///{asynchronous.path.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'omni_async'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["staleness.max_updates"] == "2" and run.data.tags["rollout.workers"] == "2"
    rewards = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "goal/reward")]
    assert sorted(rewards) == [(line["update"], line["reward"]) for line in asynchronous.metrics]
    folders = [None, *(file.path for file in client.list_artifacts(run.info.run_id) if file.is_dir)]
    files = {Path(file.path).name for folder in folders for file in client.list_artifacts(run.info.run_id, folder)}
    assert any(name.endswith(".png") for name in files) and {"summary.json", "trace.json", "config.yaml"} <= files

    folder = asynchronous.path / "checkpoints" / "update-000006"
    require_whole(folder)
    state = read_state(folder)
    assert state.version == 6 and state.engine["optimizer_steps"] == 6
    assert {*state.engine} == {"optimizer_steps", "base_digest", "base_dtype"}
    assert all(torch.isfinite(weight).all() for weight in asynchronous.weights().values())
