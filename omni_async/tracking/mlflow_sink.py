"""Writes to MLflow on one background thread, so that training never waits for its database or its server.

The caller connects: an unusable store raises there. A run that goes on is found then, and stays as it is until
`begin`. Afterwards a failure of MLflow is a warning, once, and nothing more is sent: tracking must not end a run, and
everything is in the run folder as well. `finish` waits for the queue.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from omni_async.config import schema
from omni_async.config.redact import redact
from omni_async.tracking.mlflow_connect import Connection, begin, connect

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MAX_PARAM_CHARS, _PARAMS_PER_BATCH, _METRICS_PER_BATCH = 6000, 100, 1000
_MAX_QUEUED = 1000
_NOT_IN_KEY = re.compile(r"[^\w/.\- :]")  # MLflow refuses other characters in a metric's name


class MlflowSink:
    """One MLflow run. Calls return at once; they come from one thread, `finish` last."""

    def __init__(
        self, config: schema.Mlflow, run_dir: Path, run_name: str, params: dict[str, Any], goes_on: bool = False
    ) -> None:
        """Start a run in `config.experiment`, or find the one that `begin` goes on with.

        Args:
            config: `tracking.mlflow` of the recipe.
            run_dir: `run.dir`, the folder of all runs, which holds `mlflow.db` by default.
            run_name: MLflow's name of the run.
            params: what is logged as parameters; may be nested.
            goes_on: whether to find the run of that name, whose parameters stay.

        Raises:
            MlflowUnusableError: the store cannot be used."""
        self._connection: Connection = connect(config, Path(run_dir), run_name, goes_on)
        self._client = self._connection.client
        self._params = params
        self._began = not goes_on
        self._run_id = self._connection.former or ("" if goes_on else begin(self._connection))
        self._failed = False
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()
        if self._began:
            self._put(lambda: self._send_params(params))

    def begin(self) -> None:
        """Set the run going, if it is not: before anything is logged.

        If there is no run of that name (another database, say), one is made."""
        if not self._began:
            self._began = True
            self._put(self._begin)

    def _begin(self) -> None:
        self._run_id = self._connection.begin()
        if self._connection.former is None:
            self._send_params(self._params)

    @property
    def run_id(self) -> str:
        """The run's id, empty as long as there is none."""
        return self._run_id

    @property
    def ui_command(self) -> str:
        """The shell command that shows the run, or the address to open if it is on a server."""
        return self._connection.ui_command(self._run_id)

    @property
    def run_url(self) -> str:
        """The address of the run, once the user interface is up."""
        return self._connection.run_url(self._run_id)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)  # MLflow's x axis is the real time, whatever clock the run has
        self._put(lambda: self._send_metrics(dict(metrics), step, now))

    def log_image(self, image: Image, name: str, step: int) -> None:
        """Log an image that the user interface shows as `name`, with a slider over steps."""
        self._put(lambda: self._client.log_image(self._run_id, image, key=name, step=step, synchronous=True))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file, as it is when the thread comes to it."""
        self._put(lambda: self._client.log_artifact(self._run_id, str(path), folder))

    def finish(self, status: Literal["done", "interrupted", "failed"], timeout_s: float = 60.0) -> None:
        """Send the queue, then end the run, unless it never began; give up, with a warning, after `timeout_s`."""
        if self._began:
            self._put(lambda: self._client.set_terminated(self._run_id, _STATUS[status]))
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

    def _send_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        for batch in _batches(flatten(redact(params)).items(), _PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=[Param(key, value[:_MAX_PARAM_CHARS]) for key, value in batch])

    def _send_metrics(self, metrics: dict[str, float], step: int, now: int) -> None:
        from mlflow.entities import Metric

        for batch in _batches(metrics.items(), _METRICS_PER_BATCH):
            self._client.log_batch(
                self._run_id,
                metrics=[Metric(_NOT_IN_KEY.sub("_", key), float(value), now, step) for key, value in batch],
            )


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


def _batches(items: Iterable[T], size: int) -> Iterable[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
