"""Tests against a real local sqlite store; one database for the file, because making one takes seconds."""

from __future__ import annotations

import math
import os
import shutil
from base64 import b64encode
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from omni_async.config import schema
from omni_async.records.write.sinks import mlflow_sink
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.mlflow_sink import MlflowSink, _alone, _probe
from tests.records.write.sinks.sink_world import ENDINGS, LEFT_OUT, RED, about, serving, tell
from tests.support.patience import wait_for

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = schema.Mlflow(experiment="e")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def client(runs: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")


def opened(run: Path, goes_on: bool = False, begins: bool = True, **params: object) -> tuple[MlflowSink, Sinks]:
    sink = MlflowSink(EXPERIMENT, about(run, goes_on, **params))
    sinks = Sinks([sink])
    if begins:
        sinks.begin(0)
    return sink, sinks


def test_a_run_comes_back_from_the_local_store(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    many = {**{f"p{i}": i for i in range(48)}, "long": "x" * 7000, "none": {"empty": [], "all": {}}}
    sink, sinks = opened(runs / "run-1", **many, reward={"scorers": [{"name": "ocr"}]}, range=(0, 5))
    tell(sinks)
    sinks.image(Image.new("RGB", (40, 30)), "train", step=1)
    sinks.metrics({"grad_norm": math.nan}, step=2)
    (tmp_path / "summary.json").write_text("{}")
    sinks.artifact(tmp_path / "summary.json")
    sinks.media(tmp_path / "summary.json", "train", 1)
    sinks.finish("done")

    store = client(runs)
    run = store.get_run(sink.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "run-1"
    assert run.data.params == {"algorithm.name": "flow_grpo", "staleness.max_updates": "2"}, "more hide images"
    tags = run.data.tags
    assert tags["none.empty"] == "[]" and tags["none.all"] == "{}" and tags["reward.scorers.0.name"] == "ocr"
    assert len(tags["long"]) == 5000 and "trainer.updates" not in tags, "a default"
    assert tags["not_scored"] == LEFT_OUT
    assert (tags["family"], tags["algorithm"], tags["S"]) == ("qwen_image", "flow_grpo", "2")
    assert f"omni-async report {runs / 'run-1'}" in tags["mlflow.note.content"]

    history = store.get_metric_history(sink.run_id, "goal/reward")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5)]
    [late] = store.get_metric_history(sink.run_id, "goal/validation_reward")
    assert (late.step, late.value) == (1, 0.75)
    assert "learning/odd_name" in run.data.metrics, "MLflow refuses other characters"

    assert {f.path for f in store.list_artifacts(sink.run_id)} == {"images", "samples", "summary.json"}
    files = sorted(f.path for f in store.list_artifacts(sink.run_id, "images") if f.path.endswith(".png"))
    images = ["goal~train+step+0", "goal~train+step+1", "goal~validation+step+1"]
    assert [path.partition("+timestamp")[0] for path in files] == [f"images/{name}" for name in images]
    assert Image.open(store.download_artifacts(sink.run_id, files[-1], str(tmp_path))).getpixel((5, 5)) == RED
    program, _, arguments = sink.where.partition(" ")
    assert shutil.which(program), "the command shown to the user exists"
    assert arguments == f"ui --backend-store-uri sqlite:///{runs}/mlflow.db  # then {sink.run_url}"
    assert sink.run_url.endswith(f"/runs/{sink.run_id}/model-metrics")
    out, err = capfd.readouterr()
    assert out == "" and "INFO" not in err


def test_an_unusable_store_is_refused_at_the_start(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in ("http://me:hunter2@127.0.0.1:9/", "sqlite:////proc/nowhere/mlflow.db", "nonsense://x"):
        with pytest.raises(SinkUnusableError, match=r"tracking\.mlflow: cannot use .*: .+; set tracking") as caught:
            MlflowSink(schema.Mlflow(tracking_uri=uri), about(runs / "r"))
        assert "hunter2" not in str(caught.value)
    store = client(runs)
    store.delete_experiment(store.create_experiment("gone"))
    with pytest.raises(SinkUnusableError, match="'gone' is deleted"):
        MlflowSink(schema.Mlflow(experiment="gone"), about(runs / "r"))

    def refuse(uri: str) -> None:
        raise ValueError("https://me:hunter2@h failed")

    monkeypatch.setattr(mlflow_sink, "_client", refuse)
    with pytest.raises(SinkUnusableError, match=r": https://\*\*\*@h failed; set tracking"):
        MlflowSink(EXPERIMENT, about(runs / "r"))


NAME = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "sesame"}


@pytest.mark.parametrize(
    ("secrets", "sent"),
    [(NAME, f"Basic {b64encode(b'me:sesame').decode()}"), ({"MLFLOW_TRACKING_TOKEN": "sesame"}, "Bearer sesame")],
)
def test_a_server_is_sent_the_credentials_of_the_environment_once(
    runs: Path, monkeypatch: pytest.MonkeyPatch, secrets: dict[str, str], sent: str
) -> None:
    received: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers["Authorization"])
            self.send_error(403)

        def log_message(self, *_: object) -> None: ...

    for name in (*NAME, "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    with serving(Refusing) as address, pytest.raises(SinkUnusableError, match="403"):
        MlflowSink(schema.Mlflow(tracking_uri=address), about(runs / "r"))
    assert received == [None, sent], "our own question of whether it is there goes without"


def test_a_server_that_closes_connections_is_asked_once(runs: Path) -> None:
    """MLflow itself would try it again for minutes."""
    asked: list[bytes] = []

    class Closing(BaseHTTPRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline())

    with serving(Closing) as address, pytest.raises(SinkUnusableError, match=r"tracking\.mlflow: cannot use "):
        MlflowSink(schema.Mlflow(tracking_uri=address), about(runs / "r"))
    assert len(asked) == 1


def test_a_run_that_resumes_is_the_same_run_and_running_once_it_begins_whatever_its_end_was(runs: Path) -> None:
    store, (first, sinks) = client(runs), opened(runs / "run-goes-on", seed=3)

    def status() -> str:
        return str(store.get_run(first.run_id).info.status)

    tell(sinks)
    assert status() == "RUNNING", "as a run that is killed leaves it"
    for state, ending in ENDINGS.items():
        sinks.finish(ending)
        again, sinks = opened(runs / "run-goes-on", goes_on=True, begins=False, seed=4)
        assert (again.run_id, status()) == (first.run_id, state)
        sinks.finish("failed")
        assert status() == state, "it has not begun"
        _, sinks = opened(runs / "run-goes-on", goes_on=True, begins=False, seed=4)
        sinks.begin(2)
        wait_for(lambda: status() == "RUNNING", "the run to begin")
    sinks.metrics({"reward": 0.75}, step=3)
    sinks.finish("done")
    assert status() == "FINISHED" and store.get_run(first.run_id).data.tags["seed"] == "4", "of the newest attempt"
    assert [m.step for m in store.get_metric_history(first.run_id, "goal/reward")] == [1, 2, 3]
    sink, sinks = opened(runs / "run-never-seen", goes_on=True, begins=False, seed=5)
    assert sink.run_id == sink.where == ""
    sinks.begin(5)
    sinks.finish("done")
    assert store.get_run(sink.run_id).data.tags["seed"] == "5"


@pytest.mark.parametrize("make", [os.mkfifo, lambda lock: lock.symlink_to("elsewhere")])
def test_the_lock_of_a_database_is_a_file(tmp_path, make):
    make(tmp_path / "mlflow.db.lock")
    with pytest.raises(OSError, match="not a file"), _alone(f"sqlite:///{tmp_path}/mlflow.db"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_locked_database_is_down_and_a_wrong_value_is_refused(runs):
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2 as codes

    sink, _ = opened(runs / "run-locked", begins=False)
    assert not sink.refuses(MlflowException("database is locked", codes.TEMPORARILY_UNAVAILABLE))
    assert not sink.refuses(MlflowException("API request failed with exception: connection refused"))
    assert not sink.refuses(MlflowException("slow down", codes.REQUEST_LIMIT_EXCEEDED))
    assert sink.refuses(MlflowException("no such run", codes.RESOURCE_DOES_NOT_EXIST))
    assert sink.refuses(MlflowException("not a number", codes.INVALID_PARAMETER_VALUE))


def test_a_server_of_this_machine_is_asked_without_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    with pytest.raises(OSError, match=r"refused \(through the proxy http://127\.0\.0\.1:9 of the environment\)"):
        _probe("http://tracking.internal.example:5000")
    with serving(BaseHTTPRequestHandler) as address:
        _probe(address)
    assert os.environ["no_proxy"] == "127.0.0.1", "MLflow's own client obeys it"
