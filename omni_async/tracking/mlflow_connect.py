"""Opens an MLflow run: the local sqlite database or a server, with one clear error if that can't work. MLflow is imported here, lazily
(seconds), and its global state (`mlflow.start_run` and friends) is left alone.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from omni_async.config import schema
from omni_async.config.redact import redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

_CHATTY = ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent")
_PROBE_S = 10.0
_LOCAL_UI = "http://127.0.0.1:5000"


class MlflowUnusableError(RuntimeError):
    """`tracking.mlflow` points at a place that can't be used; says which (credentials masked) and why."""


@dataclass(frozen=True)
class Connection:
    client: MlflowClient
    run_id: str
    is_new: bool
    ui_command: str
    run_url: str


def connect(config: schema.Mlflow, run_dir: Path, run_name: str, goes_on: bool = False) -> Connection:
    """A started run in `config.experiment`, which is made if it doesn't exist. Without `tracking_uri`: `<run_dir>/mlflow.db`, with
    artifacts in `<run_dir>/mlartifacts`. `goes_on`: the run of that name, where there is one."""
    run_dir = run_dir.absolute()
    uri = config.tracking_uri or f"sqlite:///{run_dir / 'mlflow.db'}"
    shown = redact_text(uri)
    try:
        _probe(uri)
        if config.tracking_uri is None:
            run_dir.mkdir(parents=True, exist_ok=True)
        client = _client(uri)
        experiment = _experiment(client, config, run_dir)
        former = _run_named(client, experiment, run_name) if goes_on else None
        run_id: str = former or client.create_run(experiment, run_name=run_name).info.run_id
    except MlflowUnusableError:
        raise
    except Exception as error:  # noqa: BLE001  # any store, any reason: it ends as one clear error
        reason = redact_text(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise MlflowUnusableError(
            f"tracking.mlflow: cannot use {shown}: {reason}; set tracking.mlflow.tracking_uri, or tracking.mlflow.enabled=false"
        ) from None  # the original may quote credentials
    server = uri.startswith(("http://", "https://"))
    run_url = f"{shown.rstrip('/') if server else _LOCAL_UI}/#/experiments/{experiment}/runs/{run_id}"
    ui_command = run_url if server else f"{_mlflow_command()} ui --backend-store-uri {shlex.quote(shown)}"
    return Connection(client, run_id, former is None, ui_command, run_url)


def _run_named(client: MlflowClient, experiment: str, name: str) -> str | None:
    """The newest run of that name, set going again."""
    found = client.search_runs([experiment], f"attributes.run_name = '{name}'", order_by=["attributes.start_time DESC"], max_results=1)
    if not found:
        return None
    run_id: str = found[0].info.run_id
    client.update_run(run_id, status="RUNNING")
    return run_id


def _mlflow_command() -> str:
    """The command of this environment, which need not be activated, as short as it can be typed from here."""
    command = Path(sys.executable).with_name("mlflow")
    if not command.exists():
        return "mlflow"
    return shlex.quote(os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command))


def _probe(uri: str) -> None:
    """Fail in seconds where MLflow's own client would retry a dead server for minutes. Any HTTP answer will do."""
    if not uri.startswith(("http://", "https://")):
        return
    parts = urlsplit(uri)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
    try:
        urllib.request.urlopen(address, timeout=_PROBE_S).close()
    except urllib.error.HTTPError:
        return


def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a training job phones nobody unless its owner says so
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient, config: schema.Mlflow, run_dir: Path) -> str:
    """The experiment's id; two runs that start together may both try to make it."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(config.experiment)
    if found is None:
        location = (run_dir / "mlartifacts").as_uri() if config.tracking_uri is None else None
        try:
            return str(client.create_experiment(config.experiment, artifact_location=location))
        except MlflowException:
            found = client.get_experiment_by_name(config.experiment)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise MlflowUnusableError(f"tracking.mlflow.experiment: {config.experiment!r} is deleted there; restore it or name another")
    return str(found.experiment_id)
