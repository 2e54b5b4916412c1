"""Opens an MLflow run: the local sqlite database or a server, with one clear error if that can't work.

MLflow is imported here, lazily (seconds), and its global state (`mlflow.start_run` and friends) is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
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
    """A `tracking.mlflow` that points at a store that can't be used; says which (credentials masked) and why."""


@dataclass(frozen=True)
class Connection:
    """A store of runs, and the existing run of that name, if there is one (`former`).

    `shown`: the store's address without credentials."""

    client: MlflowClient
    experiment: str
    run_name: str
    former: str | None
    uri: str
    shown: str

    def begin(self) -> str:
        """Set the former run going again, or start one; return its id. Raises any error of the store."""
        if self.former is not None:
            self.client.update_run(self.former, status="RUNNING")
            return self.former
        run_id: str = self.client.create_run(self.experiment, run_name=self.run_name).info.run_id
        return run_id

    def run_url(self, run_id: str) -> str:
        """Return the address of the run, once the user interface is up."""
        return (
            f"{self.shown.rstrip('/') if self._is_server else _LOCAL_UI}/#/experiments/{self.experiment}/runs/{run_id}"
        )

    def ui_command(self, run_id: str) -> str:
        """Return the shell command that shows the run, or the address to open if it is on a server."""
        return (
            self.run_url(run_id)
            if self._is_server
            else f"{_mlflow_command()} ui --backend-store-uri {shlex.quote(self.shown)}"
        )

    @property
    def _is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))


def connect(config: schema.Mlflow, run_dir: Path, run_name: str, goes_on: bool = False) -> Connection:
    """Connect to `config.experiment`, which is made if it does not exist.

    Args:
        config: without `tracking_uri` the store is `<run_dir>/mlflow.db`, with artifacts in `<run_dir>/mlartifacts`.
        run_dir: the folder of all runs.
        run_name: MLflow's name of the run.
        goes_on: whether to look for the run of that name, which stays as it is.

    Raises:
        MlflowUnusableError: the store cannot be used."""
    run_dir = run_dir.absolute()
    uri = config.tracking_uri or f"sqlite:///{run_dir / 'mlflow.db'}"
    shown = redact_text(uri)
    with _refusals(shown):
        _probe(uri)
        if config.tracking_uri is None:
            run_dir.mkdir(parents=True, exist_ok=True)
        client = _client(uri)
        experiment = _experiment(client, config, run_dir)
        return Connection(
            client, experiment, run_name, _run_named(client, experiment, run_name) if goes_on else None, uri, shown
        )


def begin(connection: Connection) -> str:
    """Begin a run and return its id. Raises MlflowUnusableError if that can't be done."""
    with _refusals(connection.shown):
        return connection.begin()


@contextlib.contextmanager
def _refusals(shown: str) -> Iterator[None]:
    """Turn any error of a store into one clear error."""
    try:
        yield
    except MlflowUnusableError:
        raise
    except Exception as error:  # noqa: BLE001  # any store, any reason: it becomes one clear error
        reason = redact_text(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise MlflowUnusableError(
            f"tracking.mlflow: cannot use {shown}: {reason}; set tracking.mlflow.tracking_uri, or"
            " tracking.mlflow.enabled=false"
        ) from None  # the original may quote credentials


def _run_named(client: MlflowClient, experiment: str, name: str) -> str | None:
    """Return the newest run of that name."""
    found = client.search_runs(
        [experiment], f"attributes.run_name = '{name}'", order_by=["attributes.start_time DESC"], max_results=1
    )
    return str(found[0].info.run_id) if found else None


def _mlflow_command() -> str:
    """Return the command of this environment, which need not be activated, as short as it can be typed from here."""
    command = Path(sys.executable).with_name("mlflow")
    if not command.exists():
        return "mlflow"
    return shlex.quote(os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command))


def _probe(uri: str) -> None:
    """Fail in seconds where MLflow's own client would retry a dead server for minutes. Accepts any HTTP answer."""
    if not uri.startswith(("http://", "https://")):
        return
    parts = urlsplit(uri)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
    try:
        urllib.request.urlopen(address, timeout=_PROBE_S).close()
    except urllib.error.HTTPError:
        return


def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no telemetry unless the user sets it
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient, config: schema.Mlflow, run_dir: Path) -> str:
    """Return the experiment's id, and make it if needed; two runs that start together may both try to."""
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
        raise MlflowUnusableError(
            f"tracking.mlflow.experiment: {config.experiment!r} is deleted there; restore it or name another"
        )
    return str(found.experiment_id)
