"""Tests the real thing, as a user starts it: Ray actors, vLLM-Omni, gloo ranks. Two runs, because each takes most of a
minute to come up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from PIL import Image

from omni_async.checkpoint import read_state, require_whole
from omni_async.config import load
from tests.e2e.runs import Run, check_every_group_ended_once, command_line, left_behind, write_recipe
from tests.e2e.sync_loop import train_synchronously

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

_REAL = ("run.runtime=ray", "rollout.engine=vllm_omni")


@pytest.mark.thorough
@pytest.mark.parametrize("how", [(), ("rollout.batching=request", "weights.swap=request")], ids=["step", "request"])
def test_staleness_zero_with_ray_and_vllm_omni_is_the_synchronous_loop(recipe: Path, how: tuple[str, ...]) -> None:
    overrides = (*_REAL, "reward.scorers=[{name: jpeg_size, params: {quality: 20}}]", *how)
    answer = command_line(recipe, *overrides, timeout=240)
    assert answer.code == 0, answer
    real = left_behind(recipe, overrides)
    check_every_group_ended_once(real)
    assert real.summary.staleness_max == 0
    assert max(line["log_ratio_nats/absmax"] for line in real.metrics) < 1e-2, "one policy update apart at most"
    weights, expected = real.weights(), train_synchronously(load(recipe, overrides))
    start = train_synchronously(load(recipe, [*overrides, "trainer.optimizer.lr=1e-30", "trainer.updates=1"]))
    difference = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    learnt = max((weights[name] - start[name]).abs().max().item() for name in start)
    assert difference <= 1e-5
    assert learnt > 1e-2, "nothing was learnt, so nothing was compared"


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    """Runs S = 2 with two engines and two trainer ranks, everything switched on."""
    folder = tmp_path_factory.mktemp("asynchronous")
    recipe = write_recipe(folder, checkpoint)
    (folder / "held_out.txt").write_text("a blue digit\nthe digit 9\n")
    overrides = (
        *_REAL,
        "rollout.workers=2",
        "trainer.workers=2",
        "staleness.max_updates=2",
        "trainer.updates=6",
        "rollout.max_inflight=4",
        "rollout.num_inference_steps=8",
        "rollout.sde.window.range=[0, 6]",
        "tracking.mlflow.enabled=true",
        "tracking.images_every=3",
        f"validation={{every: 3, prompts: {folder / 'held_out.txt'}, num_inference_steps: 4}}",
    )
    answer = command_line(recipe, *overrides, timeout=240)
    assert answer.code == 0, answer
    assert answer.stderr == ""
    assert [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("update ")] == [
        f"{n}/6" for n in range(1, 7)
    ]
    return left_behind(recipe, overrides)


def test_every_group_ended_once_within_the_budget(asynchronous: Run) -> None:
    check_every_group_ended_once(asynchronous)
    assert asynchronous.summary.updates == 6 and 0 < asynchronous.summary.staleness_max <= 2
    assert len({line["staleness"] for line in asynchronous.ledger}) > 1, "the first update is fresh, later ones are not"
    assert 0 < asynchronous.summary.peak_memory_bytes < 8 * 2**30


def test_roles_worked_at_the_same_time_and_the_trace_shows_it(asynchronous: Run) -> None:
    assert asynchronous.summary.overlap_fraction > 0
    names = {
        event["args"]["name"] for event in asynchronous.trace if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert names >= {"rollout-0", "rollout-1", "reward-0", "trainer", "publisher"}
    kinds = {event["name"] for event in asynchronous.trace if event["ph"] == "X"}
    assert kinds >= {"generate", "score", "train", "publish", "stage", "swap", "export", "checkpoint"}


def test_metrics_validation_and_images(asynchronous: Run) -> None:
    assert [line["update"] for line in asynchronous.metrics] == list(range(1, 7))
    assert all(
        line["conservation"]["admitted"] >= line["conservation"]["trained"] == 2 * line["update"]
        for line in asynchronous.metrics
    )
    versions = [point.version for point in asynchronous.summary.validation]
    assert versions[0] == 0 and versions[-1] == 6
    images = list((asynchronous.path / "samples").iterdir())
    assert {"train-000001", "train-000003", "train-000006", "validation-000000", "validation-000006"} <= {
        p.stem for p in images
    }
    for path in images:
        with Image.open(path) as image:
            image.load()


def test_mlflow_has_parameters_metrics_and_images(asynchronous: Run) -> None:
    client = MlflowClient(tracking_uri=f"sqlite:///{asynchronous.path.parent / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'omni_async'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.workers"] == "2" and run.data.params["staleness.max_updates"] == "2"
    rewards = client.get_metric_history(run.info.run_id, "reward")
    assert [(m.step, m.value) for m in sorted(rewards, key=lambda m: m.step)] == [
        (x["update"], x["reward"]) for x in asynchronous.metrics
    ]
    files = _files(client, run.info.run_id)
    assert any(name.endswith(".png") for name in files) and {"summary.json", "trace.json", "config.yaml"} <= {
        Path(f).name for f in files
    }


def test_two_ranks_left_one_whole_checkpoint(asynchronous: Run) -> None:
    folder = asynchronous.path / "checkpoints" / "update-000006"
    require_whole(folder)
    state = read_state(folder)
    assert state.version == 6 and state.engine == {"optimizer_steps": 6}
    weights = asynchronous.weights()
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def _files(client: MlflowClient, run: str, folder: str | None = None) -> list[str]:
    found = client.list_artifacts(run, folder)
    return [f.path for f in found if not f.is_dir] + [
        path for f in found if f.is_dir for path in _files(client, run, f.path)
    ]
