"""Sends a run to MLflow: settings, metrics in groups, image grids, files, a description, tags and its final status.

The constructor connects: an unusable store raises there. For a resumed run, it finds the MLflow run, which stays
unchanged until `begin`. MLflow is imported lazily (it takes seconds), and its global state (`mlflow.start_run` and
friends) is not touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from omni_async.config import schema
from omni_async.config.proxies import is_loopback, proxy_for, through
from omni_async.config.redact import redact_text
from omni_async.config.writing import open_lock
from omni_async.records.write.catalogue import chart
from omni_async.records.write.metric import Group
from omni_async.records.write.sinks.base import About, Ended, Numbers, Sink, SinkUnusableError, command_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

_STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MAX_TAG_CHARS, _MAX_TAGS, _METRICS_PER_BATCH = 5000, 100, 1000
# MLflow shows every parameter above each image: more than a few lines of them hide the image. Other settings that are
# not defaults become tags, which MLflow can also filter, show and compare.
_PARAMS = ("algorithm.name", "staleness.max_updates", "rollout.group_size", "trainer.optimizer.lr")
_NOT_IN_KEY = re.compile(r"[^\w/.\- :]")  # MLflow refuses other characters in a metric's name
_CHATTY = ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent")
_PROBE_S = 10.0
_ALONE_S = 120.0
_LATER = (409, 429, 499)  # a conflict, too many requests, a cancelled one
_SERVER = ("http://", "https://")
_LOCAL_UI = "http://127.0.0.1:5000"
_NOTE = "mlflow.note.content"  # the user interface shows it as the run's description


class MlflowSink(Sink):
    """One MLflow run. `run_id` is empty until a run exists."""

    label = "MLflow"
    gathers_s = 10.0  # an update's numbers cost 17 ms of a core alone, 7 ms with those of others

    def __init__(self, config: schema.Mlflow, about: About) -> None:
        """Start a run in `config.experiment`, created if missing, or find the run that `begin` will continue.

        Without `config.tracking_uri` the store is `mlflow.db` in the folder of all runs, its artifacts in
        `mlartifacts`. Raises SinkUnusableError."""
        self._about = about
        run_dir = about.run.path.parent.absolute()
        self._uri = config.tracking_uri or f"sqlite:///{run_dir / 'mlflow.db'}"
        self._shown = redact_text(self._uri)
        with _refusals(self._shown):
            _probe(self._uri)
            if config.tracking_uri is None:
                run_dir.mkdir(parents=True, exist_ok=True)
            with _alone(self._uri):
                self._client = _client(self._uri)
                self._experiment = _experiment(self._client, config, run_dir)
            self.run_id = self._former() if about.goes_on else self._create()
        self._has_params = bool(self.run_id) and about.goes_on

    def begin(self, version: int) -> None:
        """Mark the run as running; create it if it is missing (in another database, for example).

        Numbers of void updates cannot be retracted: MLflow shows both."""
        self.run_id = self.run_id or self._create()
        self._client.update_run(self.run_id, status="RUNNING")
        self._send_settings()

    def _create(self) -> str:
        name = self._about.run.run_id
        return str(self._client.create_run(self._experiment, run_name=name).info.run_id)

    def _former(self) -> str:
        """Return the id of the newest run of that name, or an empty text."""
        named, newest = f"attributes.run_name = '{self._about.run.run_id}'", ["attributes.start_time DESC"]
        found = self._client.search_runs([self._experiment], named, order_by=newest, max_results=1)
        return str(found[0].info.run_id) if found else ""

    @property
    def run_url(self) -> str:
        """The address of the run's charts, once the user interface runs."""
        ui = self._shown.rstrip("/") if self._uri.startswith(_SERVER) else _LOCAL_UI
        return f"{ui}/#/experiments/{self._experiment}/runs/{self.run_id}/model-metrics"

    @property
    def where(self) -> str:
        """The shell command for the user interface, and the run's address in it; on a server, the address alone."""
        if not self.run_id or self._uri.startswith(_SERVER):
            return self.run_url if self.run_id else ""
        return f"{command_of('mlflow')} ui --backend-store-uri {shlex.quote(self._shown)}  # then {self.run_url}"

    def metrics(self, rows: Sequence[Numbers]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), float(value), int(seconds * 1000), step)
            for numbers, step, seconds in rows
            for name, value in numbers.items()
        ]
        for start in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_PER_BATCH])

    def image(self, image: Image, kind: str, step: int) -> None:
        """Log a grid, which the user interface shows among the charts, with a slider over steps.

        The slider starts at 0; there it shows samples of the first update, which version 0 generated."""
        for at in (0, 1) if (kind, step) == ("train", 1) else (step,):
            self._client.log_image(self.run_id, image, key=f"{Group.GOAL}/{kind}", step=at, synchronous=True)

    def media(self, path: Path, kind: str, step: int) -> None:
        self._client.log_artifact(self.run_id, str(path), "samples")

    def remark(self, name: str, text: str, step: int) -> None:
        self._client.set_tag(self.run_id, name, text[:_MAX_TAG_CHARS])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path))

    def finish(self, status: Ended | None) -> None:
        if status is not None and self.run_id:
            self._client.set_terminated(self.run_id, _STATUS[status])

    def refuses(self, error: Exception) -> bool:
        from mlflow.exceptions import MlflowException

        return _is_refusal(error) if isinstance(error, MlflowException) else super().refuses(error)

    def _send_settings(self) -> None:
        from mlflow.entities import Param, RunTag

        values = flatten(self._about.params)
        tags = {**flatten(self._about.changed), **self._about.tags, _NOTE: self._about.description}
        self._client.log_batch(
            self.run_id,
            params=[] if self._has_params else [Param(key, values[key]) for key in _PARAMS if key in values],
            tags=[RunTag(key, value[:_MAX_TAG_CHARS]) for key, value in tags.items()][:_MAX_TAGS],
        )
        self._has_params = True


def _key(name: str) -> str:
    return _NOT_IN_KEY.sub("_", chart(name))


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
    except SinkUnusableError:
        raise
    except Exception as error:  # noqa: BLE001  # any store, any reason: it becomes one clear error
        reason = redact_text(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise SinkUnusableError(
            f"tracking.mlflow: cannot use {shown}: {reason}; set tracking.mlflow.tracking_uri, or"
            " tracking.mlflow.enabled=false",
            down=not _is_refusal(error),
        ) from None  # the original may quote credentials


def _is_refusal(error: Exception) -> bool:
    """Return whether MLflow rejected the call itself, rather than being unreachable or locked."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return False
    status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
    return 400 <= status < 500 and status not in _LATER


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Exclude other runs of this machine from the same local database while the body runs.

    The first run to open it creates its schema, and MLflow fails if two runs do so concurrently."""
    path = uri.partition("sqlite:///")[2]
    if not path:
        yield
        return
    deadline = time.monotonic() + _ALONE_S
    while True:
        try:
            lock = open_lock(Path(f"{path}.lock"))
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another run has held {path}.lock for {_ALONE_S:g} s") from None
            time.sleep(0.05)
    with lock:
        yield


def _probe(uri: str) -> None:
    """Fail in seconds; MLflow's own client would retry a dead server for minutes. Accepts any HTTP answer."""
    if not uri.startswith(_SERVER):
        return
    parts = urlsplit(uri)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
    proxy = proxy_for(uri)
    if proxy is None and (host := parts.hostname):
        _bypass(host)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({parts.scheme: proxy} if proxy else {}))
    try:
        opener.open(address, timeout=_PROBE_S).close()
    except urllib.error.HTTPError:
        return
    except OSError as error:
        raise OSError(f"{getattr(error, 'reason', error)}{through(proxy)}") from None


def _bypass(host: str) -> None:
    """Exempt a host of this machine from the environment's proxies, which MLflow's client and its children obey."""
    if not is_loopback(host):
        return
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [one.strip() for one in os.environ.get(name, "").split(",") if one.strip()]
        if "*" not in hosts and host not in hosts and (hosts or urllib.request.getproxies()):
            os.environ[name] = ",".join([*hosts, host])


def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no telemetry unless the user sets it
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient, config: schema.Mlflow, run_dir: Path) -> str:
    """Return the experiment's id; create it if needed, even if another run creates it concurrently."""
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
        raise SinkUnusableError(
            f"tracking.mlflow.experiment: {config.experiment!r} is deleted there; restore it or name another"
        )
    return str(found.experiment_id)
