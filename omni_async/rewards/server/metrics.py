"""Counts the requests and samples of a reward server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server, in a separate registry.

    `requests` by status; `samples` by outcome: scored, failed, remembered."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        ProcessCollector(registry=own)
        name = "omni_async_reward"
        self.requests = Counter(f"{name}_requests", "Requests, by HTTP status.", ["status"], registry=own)
        self.samples = Counter(f"{name}_samples", "Samples, by what became of them.", ["outcome"], registry=own)
        self.request_s = Histogram(
            f"{name}_request_seconds", "From a request's headers to its answer.", buckets=_SECONDS, registry=own
        )
        self._batch_s = Histogram(f"{name}_batch_seconds", "Scoring of a batch.", buckets=_SECONDS, registry=own)
        self._batch = Histogram(f"{name}_batch_samples", "Samples of a batch.", buckets=_SIZES, registry=own)
        self.waiting = Gauge(f"{name}_waiting", "Samples that wait for a scorer.", registry=own)
        self.held = Gauge(f"{name}_held_bytes", "Bytes of requests that are held.", registry=own)
        self.up = Gauge(f"{name}_up", "1 if a scorer answers.", registry=own)

    def scored(self, num_samples: int, seconds: float) -> None:
        self._batch.observe(num_samples)
        self._batch_s.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
