"""Serves a run's newest numbers to Prometheus at `/metrics`, for as long as the run lasts.

What the placeholders of a metric's name stand for are labels: `busy/<role>` is
`omni_async_busy_by_role{role="trainer"}`.
"""

from __future__ import annotations

import errno
import re

from prometheus_client import CollectorRegistry, Gauge, Info, start_http_server

from omni_async.config import schema
from omni_async.tracking.catalogue import Metric, find
from omni_async.tracking.files import keep_from_children
from omni_async.tracking.sinks.base import About, Ended, Sink, SinkUnusableError

_PREFIX = "omni_async_"
_NEWEST = {"update": "the newest update", "validation_update": "the version of the newest validation round"}
_OWN = "a metric of the objective's own"
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusSink(Sink):
    label = "Prometheus"

    def __init__(self, config: schema.Prometheus, about: About) -> None:
        """Listen. SinkUnusableError if that cannot be done there."""
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(config.port, config.host, self._registry)
        except OSError as error:
            raise SinkUnusableError(
                f"tracking.prometheus: cannot listen at {config.host}:{config.port}: {error.strerror or error}; set"
                " tracking.prometheus.port, 0 for any free one",
                down=error.errno == errno.EADDRINUSE,  # the attempt before may be about to close it
            ) from None
        keep_from_children(self._server.socket)
        self._address = f"http://{config.host}:{self._server.server_port}/metrics"
        run = Info(f"{_PREFIX}run", "what the run is", registry=self._registry)
        run.info({"run": about.run.run_id, **about.tags})

    @property
    def live(self) -> str:
        return f"Prometheus metrics at {self._address}"

    def metrics(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        for name, value in numbers.items():
            metric, labels = find(name)
            gauge = self._gauge(name, _OWN, ()) if metric is None else self._gauge(*described(metric), metric.labels)
            (gauge.labels(**labels) if labels else gauge).set(value)
        sources = {metric.source for name in numbers if (metric := find(name)[0]) is not None}
        newest = "validation_update" if sources == {"validation"} else "update"
        self._gauge(newest, _NEWEST[newest], ()).set(step)

    def finish(self, status: Ended | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        full = _PREFIX + _NOT_IN_NAME.sub("_", name)
        if full not in self._gauges:
            self._gauges[full] = Gauge(full, text, labels, registry=self._registry)
        return self._gauges[full]


def described(metric: Metric) -> tuple[str, str]:
    """Return a metric's name without the prefix, and its HELP."""
    fixed = re.sub(r"[/_]?<\w+>", "", metric.name)
    name = "_by_".join([fixed, "_".join(metric.labels)]) if metric.labels else fixed
    return name, f"{metric.text} ({metric.unit})" if metric.unit else metric.text
