"""Writes to MLflow on one background thread, so that training never waits for its database or its server.

The caller connects: an unusable store raises there. A run that goes on is found then, and stays as it is until
`begin`. Afterwards a failure of MLflow is a warning, once, and nothing more is sent: tracking must not end a run, and
everything is in the run folder as well. `finish` waits for the queue.

MLflow is imported lazily (it takes seconds), and its global state (`mlflow.start_run` and friends) is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from omni_async.config import schema
from omni_async.config.redact import redact, redact_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MAX_PARAM_CHARS, _PARAMS_PER_BATCH, _METRICS_PER_BATCH = 6000, 100, 1000
_MAX_QUEUED = 1000
_NOT_IN_KEY = re.compile(r"[^\w/.\- :]")  # MLflow refuses other characters in a metric's name
_CHATTY = ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent")
_PROBE_S = 10.0
_SERVER = ("http://", "https://")
_LOCAL_UI = "http://127.0.0.1:5000"


class MlflowUnusableError(RuntimeError):
    """A `tracking.mlflow` that points at a store that can't be used; says which (credentials masked) and why."""


class MlflowSink:
    """One MLflow run. Calls return at once; they come from one thread, `finish` last.

    `run_id` is empty as long as there is no run."""

    def __init__(
        self, config: schema.Mlflow, run_dir: Path, run_name: str, params: dict[str, Any], goes_on: bool = False
    ) -> None:
        """Start a run in `config.experiment`, which is made if it is not there, or find the one that `begin` goes on.

        Args:
            config: without `tracking_uri` the store is `<run_dir>/mlflow.db`, its artifacts in `<run_dir>/mlartifacts`.
            run_dir: `run.dir`, the folder of all runs.
            run_name: MLflow's name of the run.
            params: what is logged as parameters; may be nested.
            goes_on: whether to find the run of that name, which stays as it is, with its parameters.

        Raises:
            MlflowUnusableError: the store cannot be used."""
        run_dir = run_dir.absolute()
        self._uri = config.tracking_uri or f"sqlite:///{run_dir / 'mlflow.db'}"
        self._shown = redact_text(self._uri)
        self._name, self._params = run_name, params
        self._began, self._failed = False, False
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=_MAX_QUEUED)
        with _refusals(self._shown):
            _probe(self._uri)
            if config.tracking_uri is None:
                run_dir.mkdir(parents=True, exist_ok=True)
            self._client = _client(self._uri)
            self._experiment = _experiment(self._client, config, run_dir)
            self.run_id = self._former() if goes_on else self._create()
        self._has_params = bool(self.run_id) and goes_on
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        if not goes_on:
            self.begin()

    def begin(self) -> None:
        """Set the run going, if it is not: before anything is logged.

        If there is no run of that name (another database, say), one is made."""
        if not self._began:
            self._began = True
            self._put(self._begin)

    def _begin(self) -> None:
        if self._has_params:
            self._client.update_run(self.run_id, status="RUNNING")
            return
        self.run_id = self.run_id or self._create()
        self._send_params()

    def _create(self) -> str:
        return str(self._client.create_run(self._experiment, run_name=self._name).info.run_id)

    def _former(self) -> str:
        """Return the newest run of that name, or an empty text."""
        named, newest = f"attributes.run_name = '{self._name}'", ["attributes.start_time DESC"]
        found = self._client.search_runs([self._experiment], named, order_by=newest, max_results=1)
        return str(found[0].info.run_id) if found else ""

    @property
    def run_url(self) -> str:
        """The address of the run, once the user interface is up."""
        ui = self._shown.rstrip("/") if self._uri.startswith(_SERVER) else _LOCAL_UI
        return f"{ui}/#/experiments/{self._experiment}/runs/{self.run_id}"

    @property
    def ui_command(self) -> str:
        """The shell command that shows the run, or the address to open if it is on a server."""
        if self._uri.startswith(_SERVER):
            return self.run_url
        return f"{_mlflow_command()} ui --backend-store-uri {shlex.quote(self._shown)}"

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)  # MLflow's x axis is the real time, whatever clock the run has
        self._put(lambda: self._send_metrics(dict(metrics), step, now))

    def log_image(self, image: Image, name: str, step: int) -> None:
        """Log an image, which the user interface shows with a slider over steps.

        Args:
            image: read later, by the thread: not to be changed.
            name: the same for the images of one slider.
            step: its place there."""
        self._put(lambda: self._client.log_image(self.run_id, image, key=name, step=step, synchronous=True))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, as it is when the thread comes to it."""
        self._put(lambda: self._client.log_artifact(self.run_id, str(path), folder))

    def finish(self, status: Literal["done", "interrupted", "failed"], timeout_s: float = 60.0) -> None:
        """Send the queue, then end the run, unless it never began; give up, with a warning, after `timeout_s`."""
        if self._began:
            self._put(lambda: self._client.set_terminated(self.run_id, _STATUS[status]))
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._fail("it accepts nothing any more")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"still writing after {timeout_s:.0f} s")

    def _put(self, send: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            self._queue.put_nowait(send)
        except queue.Full:
            self._fail(f"{_MAX_QUEUED} writes behind")

    def _work(self) -> None:
        while (send := self._queue.get()) is not None:
            if self._failed:
                continue
            try:
                send()
            except Exception as error:  # noqa: BLE001 (stores raise anything: sqlalchemy's, requests', OSError)
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            message = redact(reason).strip().partition("\n")[0]
            logger.warning("MLflow logging stops here (%s); the run goes on and its folder has everything", message)

    def _send_params(self) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:_MAX_PARAM_CHARS]) for key, value in flatten(redact(self._params)).items()]
        for start in range(0, len(params), _PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=params[start : start + _PARAMS_PER_BATCH])

    def _send_metrics(self, numbers: dict[str, float], step: int, now: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_NOT_IN_KEY.sub("_", key), float(value), now, step) for key, value in numbers.items()]
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested dicts to dotted names, lists of them by index: `reward.scorers.0.name`."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


# ---- the store -------------------------------------------------------------------------------------------------------


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


def _mlflow_command() -> str:
    """Return the command of this environment, which need not be activated, as short as it can be typed from here."""
    command = Path(sys.executable).with_name("mlflow")
    if not command.exists():
        return "mlflow"
    return shlex.quote(os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command))


def _probe(uri: str) -> None:
    """Fail in seconds where MLflow's own client would retry a dead server for minutes. Accepts any HTTP answer."""
    if not uri.startswith(_SERVER):
        return
    parts = urlsplit(uri)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(address, timeout=_PROBE_S).close()


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
