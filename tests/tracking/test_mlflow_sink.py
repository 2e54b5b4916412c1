"""Tests against a real local sqlite store; one database for the file, because making one takes seconds."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from omni_async.config import schema
from omni_async.tracking.mlflow_sink import MlflowSink, MlflowUnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAMS = {"run": {"seed": 3}, "reward": {"scorers": [{"name": "ocr"}]}, "range": (0, 5), "uri": "http://me:pw@h/"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def client(runs: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")


def test_a_run_comes_back_from_the_local_store(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    params = {**PARAMS, **{f"p{i}": i for i in range(148)}, "long": "x" * 7000, "none": {"empty": [], "all": {}}}
    sink = MlflowSink(schema.Mlflow(experiment="e"), runs, "run-1", params)
    sink.log_metrics({"reward": 0.25, "odd+name": 1.0}, step=1)
    sink.log_metrics({"reward": 0.5, "nan": math.nan}, step=2)
    sink.log_image(Image.new("RGB", (40, 30), (200, 0, 0)), "samples", step=2)
    (tmp_path / "summary.json").write_text("{}")
    sink.log_artifact(tmp_path / "summary.json")
    sink.finish("done")

    store = client(runs)
    run = store.get_run(sink.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "run-1"
    assert run.data.params["run.seed"] == "3" and run.data.params["reward.scorers.0.name"] == "ocr"
    assert run.data.params["none.empty"] == "[]" and run.data.params["none.all"] == "{}"
    assert run.data.params["uri"] == "http://***@h/"
    assert len(run.data.params["long"]) == 6000 and len(run.data.params) == 155
    assert [(m.step, m.value) for m in store.get_metric_history(sink.run_id, "reward")] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["odd_name"] == 1.0
    [image] = [f.path for f in store.list_artifacts(sink.run_id, "images") if f.path.endswith(".png")]
    assert Image.open(store.download_artifacts(sink.run_id, image, str(tmp_path))).getpixel((5, 5)) == (200, 0, 0)
    assert (runs / "mlartifacts").is_dir()
    assert [f.path for f in store.list_artifacts(sink.run_id) if not f.is_dir] == ["summary.json"]
    program, _, arguments = sink.ui_command.partition(" ")
    assert shutil.which(program), "the command shown to the user exists"
    assert arguments == f"ui --backend-store-uri sqlite:///{runs}/mlflow.db"
    assert sink.run_url.endswith(f"/runs/{sink.run_id}")
    out, err = capfd.readouterr()
    assert out == "" and "INFO" not in err


def test_a_failing_store_is_one_warning_and_never_an_error(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = MlflowSink(schema.Mlflow(experiment="e"), runs, "r", {"a": 1})
    for step in range(3):
        sink.log_artifact(Path("/nowhere/at/all"))
        sink.log_metrics({"x": 1.0}, step)
    with caplog.at_level(logging.WARNING):
        sink.finish("done")
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("omni_async")]
    assert len(warnings) == 1 and "MLflow logging stops here" in warnings[0]


def test_callers_never_wait_for_the_store(runs, monkeypatch, caplog):
    from mlflow import MlflowClient

    release = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: release.wait(30))
    sink = MlflowSink(schema.Mlflow(experiment="e"), runs, "r", {})
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(1500):
            sink.log_metrics({"x": 1.0}, step)
    assert time.monotonic() - started < 5.0
    assert [r.getMessage() for r in caplog.records if "writes behind" in r.getMessage()] != []
    release.set()
    sink.finish("failed")


@pytest.mark.parametrize("uri", ["http://me:hunter2@127.0.0.1:9/", "sqlite:////proc/nowhere/mlflow.db", "nonsense://x"])
def test_an_unusable_store_is_refused_at_the_start(uri: str, runs: Path) -> None:
    started = time.monotonic()
    with pytest.raises(MlflowUnusableError, match=r"tracking\.mlflow: cannot use .*: .+; set tracking") as caught:
        MlflowSink(schema.Mlflow(tracking_uri=uri), runs, "r", {})
    assert "hunter2" not in str(caught.value)
    assert time.monotonic() - started < 30


def test_a_deleted_experiment_is_refused(runs: Path) -> None:
    store = client(runs)
    store.delete_experiment(store.create_experiment("gone"))
    with pytest.raises(MlflowUnusableError, match="'gone' is deleted"):
        MlflowSink(schema.Mlflow(experiment="gone"), runs, "r", {})


def sink_of(runs: Path, name: str, goes_on: bool = False, seed: int = 3) -> MlflowSink:
    return MlflowSink(schema.Mlflow(experiment="e"), runs, name, {**PARAMS, "run": {"seed": seed}}, goes_on)


def test_a_run_that_goes_on_is_the_same_run(runs: Path) -> None:
    first = sink_of(runs, "run-goes-on")
    first.log_metrics({"reward": 0.25}, step=1)
    first.finish("failed")
    store = client(runs)
    assert store.get_run(first.run_id).info.status == "FAILED"
    again = sink_of(runs, "run-goes-on", goes_on=True, seed=4)
    assert again.run_id == first.run_id
    again.begin()
    again.log_metrics({"reward": 0.5}, step=2)
    again.finish("done")
    run = store.get_run(again.run_id)
    assert run.info.status == "FINISHED" and run.data.params["run.seed"] == "3", "parameters cannot change"
    assert [(m.step, m.value) for m in store.get_metric_history(again.run_id, "reward")] == [(1, 0.25), (2, 0.5)]
    new = sink_of(runs, "run-never-seen", goes_on=True)
    new.begin()
    new.finish("done")
    assert new.run_id != first.run_id and store.get_run(new.run_id).data.params["run.seed"] == "3"


def test_a_run_that_goes_on_is_running_once_it_has_begun_and_otherwise_stays_as_it_was(runs: Path) -> None:
    store, first = client(runs), sink_of(runs, "run-left-alone")
    first.finish("interrupted")
    sink_of(runs, "run-left-alone", goes_on=True).finish("failed")
    assert store.get_run(first.run_id).info.status == "KILLED"
    sink_of(runs, "unknown-run", goes_on=True).finish("failed")
    experiment = store.get_experiment_by_name("e")
    assert experiment is not None
    assert not store.search_runs([experiment.experiment_id], "attributes.run_name = 'unknown-run'")
    again = sink_of(runs, "run-left-alone", goes_on=True)
    again.begin()
    again._queue.put(None)
    again._thread.join(30)
    assert store.get_run(first.run_id).info.status == "RUNNING"
