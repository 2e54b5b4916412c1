"""Serves a run's newest numbers to Prometheus at `/metrics`, for as long as the run lasts.

Placeholders of a metric's name become labels: `busy/<role>` is `omni_async_busy_by_role{role="trainer"}`.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Sequence
from threading import BoundedSemaphore, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Gauge, Info, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from omni_async.config import schema
from omni_async.records.write.catalogue import find
from omni_async.records.write.files import keep_from_children
from omni_async.records.write.metric import Metric
from omni_async.records.write.sinks.base import About, Ended, Numbers, Sink, SinkUnusableError

_PREFIX = "omni_async_"
_NEWEST = {"update": "the newest update", "validation_update": "the version of the newest validation round"}
_OWN = "a metric of the objective's own"
_MOST_CLIENTS = 16
_PATIENCE_S = 10.0  # for a client to send its request and read the answer
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusSink(Sink):
    label = "Prometheus"

    def __init__(self, config: schema.Prometheus, about: About) -> None:
        """Listen. Raises SinkUnusableError if the address cannot be used."""
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server = _Server(config.host, config.port, self._registry)
        except OSError as error:
            raise SinkUnusableError(
                f"tracking.prometheus: cannot listen at {config.host}:{config.port}: {error.strerror or error}; set"
                " tracking.prometheus.port, 0 for any free one",
                down=error.errno == errno.EADDRINUSE,  # the previous attempt may be about to close it
            ) from None
        keep_from_children(self._server.socket)
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="Prometheus", daemon=True)
        self._thread.start()
        self._address = f"http://{config.host}:{self._server.server_port}/metrics"
        run = Info(f"{_PREFIX}run", "what the run is", registry=self._registry)
        run.info({"run": about.run.run_id, **about.tags})

    @property
    def live(self) -> str:
        return f"Prometheus metrics at {self._address}"

    def metrics(self, rows: Sequence[Numbers]) -> None:
        for numbers, step, _ in rows:
            self._set(numbers, step)

    def _set(self, numbers: dict[str, float], step: int) -> None:
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


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class _Server(ThreadingWSGIServer):
    """A server for a few clients at once, for a few seconds each; it closes further connections immediately."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._room = BoundedSemaphore(_MOST_CLIENTS)
        super().__init__((str(address[0]), port), _Quiet)
        self.set_app(make_wsgi_app(registry))

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        def end() -> None:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

        too_late = Timer(_PATIENCE_S, end)
        too_late.daemon = True
        too_late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            too_late.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: strangers could fill the log."""


def described(metric: Metric) -> tuple[str, str]:
    """Return a metric's name without the prefix, and its HELP."""
    fixed = re.sub(r"[/_]?<\w+>", "", metric.name)
    name = "_by_".join([fixed, "_".join(metric.labels)]) if metric.labels else fixed
    return name, f"{metric.text} ({metric.unit})" if metric.unit else metric.text
