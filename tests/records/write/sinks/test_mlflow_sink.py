"""Tests against a real local sqlite store; one database for the file, because making one takes seconds."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from omni_async.config import schema
from omni_async.records.write.sinks import mlflow_sink
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.mlflow_sink import MlflowSink, _alone, _probe
from tests.records.write.sinks.sink_world import ENDINGS, LEFT_OUT, RED, about, tell

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
    [image] = [f.path for f in store.list_artifacts(sink.run_id, "images") if f.path.endswith(".png")]
    assert Image.open(store.download_artifacts(sink.run_id, image, str(tmp_path))).getpixel((5, 5)) == RED
    assert (runs / "mlartifacts").is_dir()
    assert {f.path for f in store.list_artifacts(sink.run_id)} == {"images", "samples", "summary.json"}
    program, _, arguments = sink.where.partition(" ")
    assert shutil.which(program), "the command shown to the user exists"
    assert arguments == f"ui --backend-store-uri sqlite:///{runs}/mlflow.db"
    assert sink.run_url.endswith(f"/runs/{sink.run_id}/model-metrics")
    out, err = capfd.readouterr()
    assert out == "" and "INFO" not in err


def test_numbers_are_at_their_versions_under_names_whose_first_section_is_what_the_run_is_for(runs: Path) -> None:
    sink, sinks = opened(runs / "run-numbers")
    tell(sinks)
    sinks.image(Image.new("RGB", (40, 30)), "train", step=1)
    sinks.finish("done")
    store = client(runs)

    def history(name: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in store.get_metric_history(sink.run_id, name)]

    assert history("goal/reward") == [(1, 0.25), (2, 0.5)] and history("goal/validation_reward") == [(1, 0.75)]
    names = store.get_run(sink.run_id).data.metrics
    sections = sorted({name.rpartition("/")[0] for name in names})
    assert sections == ["goal", "goal_parts", "learning", "off_policy_by_step", "waiting"]
    assert "learning/odd_name" in names, "MLflow refuses other characters"
    files = [f.path for f in store.list_artifacts(sink.run_id, "images") if f.path.endswith(".png")]
    steps = sorted(path.partition("+timestamp")[0] for path in files)
    images = ["goal~train+step+0", "goal~train+step+1", "goal~validation+step+1"]
    assert steps == [f"images/{name}" for name in images], "images are in that section, too"


@pytest.mark.parametrize("uri", ["http://me:hunter2@127.0.0.1:9/", "sqlite:////proc/nowhere/mlflow.db", "nonsense://x"])
def test_an_unusable_store_is_refused_at_the_start(uri: str, runs: Path) -> None:
    with pytest.raises(SinkUnusableError, match=r"tracking\.mlflow: cannot use .*: .+; set tracking") as caught:
        MlflowSink(schema.Mlflow(tracking_uri=uri), about(runs / "r"))
    assert "hunter2" not in str(caught.value)


def test_credentials_in_why_a_store_is_unusable_are_masked(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_server_is_sent_the_credentials_of_the_environment(
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
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(SinkUnusableError, match="403"):
            MlflowSink(schema.Mlflow(tracking_uri=f"http://127.0.0.1:{server.server_port}"), about(runs / "r"))
        server.shutdown()
    assert received == [None, sent], "our own question of whether it is there goes without"


@pytest.mark.thorough
def test_the_user_interface_is_at_loopback_by_default() -> None:
    from click import Context
    from mlflow.cli import cli

    command = cli.get_command(Context(cli), "ui")
    assert command is not None
    assert {(one.name, one.default) for one in command.params} >= {("host", "127.0.0.1"), ("port", 5000)}
    assert mlflow_sink._LOCAL_UI == "http://127.0.0.1:5000"


def test_a_server_that_refuses_is_asked_once(runs: Path) -> None:
    """MLflow itself would try it again for minutes."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    with server.accept()[0] as connection:
                        asked.append(connection.recv(1000))

        refusing = threading.Thread(target=refuse)
        refusing.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(SinkUnusableError, match=r"tracking\.mlflow: cannot use "):
            MlflowSink(schema.Mlflow(tracking_uri=address), about(runs / "r"))
        server.shutdown(socket.SHUT_RDWR)
        refusing.join()
    assert len(asked) == 1


def test_a_deleted_experiment_is_refused(runs: Path) -> None:
    store = client(runs)
    store.delete_experiment(store.create_experiment("gone"))
    with pytest.raises(SinkUnusableError, match="'gone' is deleted"):
        MlflowSink(schema.Mlflow(experiment="gone"), about(runs / "r"))


def test_a_run_that_goes_on_is_the_same_run_and_running_from_its_beginning_on_whatever_its_end_was(runs: Path) -> None:
    store, (first, sinks) = client(runs), opened(runs / "run-goes-on", seed=3)
    tell(sinks)
    assert store.get_run(first.run_id).info.status == "RUNNING", "as a run that is killed leaves it"
    for state, status in ENDINGS.items():
        sinks.finish(status)
        assert store.get_run(first.run_id).info.status == state
        again, sinks = opened(runs / "run-goes-on", goes_on=True, begins=False, seed=4)
        assert again.run_id == first.run_id
        assert store.get_run(first.run_id).info.status == state, "until it has begun it stays as it was"
        sinks.finish("failed")
        assert store.get_run(first.run_id).info.status == state
        again, sinks = opened(runs / "run-goes-on", goes_on=True, begins=False, seed=4)
        again.begin(2)
        assert store.get_run(first.run_id).info.status == "RUNNING"
        sinks.begin(2)
    sinks.metrics({"reward": 0.75}, step=3)
    sinks.finish("done")
    run = store.get_run(first.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["seed"] == "4", "of the newest attempt"
    assert [m.step for m in store.get_metric_history(first.run_id, "goal/reward")] == [1, 2, 3]


def test_a_run_that_goes_on_and_is_not_there_is_made_when_it_begins(runs: Path) -> None:
    sink, sinks = opened(runs / "run-never-seen", goes_on=True, begins=False, seed=5)
    assert sink.run_id == "" and sink.where == ""
    sinks.begin(5)
    sinks.finish("done")
    assert client(runs).get_run(sink.run_id).data.tags["seed"] == "5"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_of_a_database_is_a_file(tmp_path, kind):
    lock = tmp_path / "mlflow.db.lock"
    if kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to("elsewhere")
    with pytest.raises(OSError, match="not a file"), _alone(f"sqlite:///{tmp_path}/mlflow.db"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_locked_database_is_down_and_a_wrong_value_is_refused(tmp_path):
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2 as codes

    sink = MlflowSink(schema.Mlflow(), about(tmp_path / "runs" / "run"))
    assert not sink.refuses(MlflowException("database is locked", codes.TEMPORARILY_UNAVAILABLE))
    assert not sink.refuses(MlflowException("API request failed with exception: connection refused"))
    assert not sink.refuses(MlflowException("slow down", codes.REQUEST_LIMIT_EXCEEDED))
    assert sink.refuses(MlflowException("no such run", codes.RESOURCE_DOES_NOT_EXIST))
    assert sink.refuses(MlflowException("not a number", codes.INVALID_PARAMETER_VALUE))


def test_a_server_of_this_machine_is_asked_without_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _probe(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert os.environ["no_proxy"] == "127.0.0.1", "MLflow's own client obeys it"


def test_an_unreachable_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"refused \(through the proxy http://127\.0\.0\.1:9 of the environment\)"):
        _probe("http://tracking.internal.example:5000")
