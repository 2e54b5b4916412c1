"""Tests of the endpoint, scraped over HTTP and read with Prometheus' own parser."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_async.config import schema
from omni_async.records.write.metrics import METRICS
from omni_async.records.write.sinks import prometheus_sink
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.prometheus_sink import PrometheusSink, described
from tests.records.write.sinks.sink_world import about, tell
from tests.support.patience import PATIENCE, wait_for
from tests.support.ports import listening_at


def scrape(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def opened(run: Path, port: int = 0) -> tuple[PrometheusSink, str, int]:
    """Returns a sink, its address and its port."""
    sink = PrometheusSink(schema.Prometheus(enabled=True, port=port), about(run))
    address = sink.live.rpartition(" ")[2]
    return sink, address, int(address.split(":")[2].partition("/")[0])


def test_the_newest_numbers_are_served_with_labels_and_descriptions_on_loopback_until_the_run_ends(tmp_path: Path):
    sink, address, port = opened(tmp_path / "run-1")
    other, at_other, _ = opened(tmp_path / "run-2")  # runs do not mix
    with pytest.raises(SinkUnusableError, match=rf"^tracking\.prometheus: cannot listen at 127\.0\.0\.1:{port}: Addr"):
        opened(tmp_path / "run-3", port)
    sinks = Sinks([sink])
    sinks.begin(0)
    tell(sinks)
    done: dict[str, Any] = {}
    sinks._feeds[0].put(lambda sink: done.update(scrape(address)))
    assert listening_at(port) == ["127.0.0.1"]
    sinks.finish("done")

    def values(name: str) -> list[tuple[dict[str, str], float]]:
        return [(sample.labels, sample.value) for sample in done[f"omni_async_{name}"].samples]

    assert values("reward") == [({}, 0.5)] and values("update") == [({}, 2)]
    assert values("validation_reward") == [({}, 0.75)] and values("validation_update") == [({}, 1)]
    assert values("busy_by_role") == [({"role": "trainer"}, 0.75)]
    assert values("reward_by_part") == [({"part": "ocr_exact"}, 0.125)]
    assert values("ess_step_by_step") == [({"step": "03"}, 0.9)] and values("odd_name") == [({}, 1.0)]
    [(run, _)] = values("run_info")
    assert run == {"run": "run-1", "family": "qwen_image", "algorithm": "flow_grpo", "S": "2"}
    assert "in which the role was busy (fraction)" in done["omni_async_busy_by_role"].documentation
    assert not [name for name in done if name.startswith(("python", "process"))]
    with pytest.raises(urllib.error.URLError):
        scrape(address)
    assert listening_at(port) == []
    assert set(scrape(at_other)) == {"omni_async_run_info"}
    other.finish(None)
    names = [described(metric)[0].replace("/", "_") for metric in METRICS]
    assert len({*names}) == len(names) and "validation_update" not in names


def test_clients_that_ask_for_nothing_lose_their_places_and_strangers_fill_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(prometheus_sink, "_MOST_CLIENTS", 2)
    monkeypatch.setattr(prometheus_sink, "_PATIENCE_S", 0.1)
    sink, address, port = opened(tmp_path / "run-1")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(3)]
        idle[0].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        for one in (idle[2], *idle[:2]):  # the third is one too many
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
    wait_for(lambda: sink._server._room._value == 2, "the places to be free")
    assert set(scrape(address)) == {"omni_async_run_info"}
    sink.finish(None)
    assert capfd.readouterr() == ("", "")
