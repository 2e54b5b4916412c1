"""Tests the store at which ranks meet; `training/test_pretended_npu.py` has ranks that do."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from omni_async.training import device
from omni_async.weights.transport.tcp_store import address_towards, interface_towards, join_store, serve_store
from tests.support.patience import PATIENCE
from tests.support.ports import listening_at


def test_a_store_listens_at_one_address_for_as_long_as_it_is_kept() -> None:
    store = serve_store("127.0.0.1", PATIENCE)
    port = store.port
    assert listening_at(port) == ["127.0.0.1"]
    join_store("127.0.0.1", port, PATIENCE).set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening_at(port) == []


def test_the_interface_towards_a_host_has_this_machines_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = address_towards("127.0.0.2", 1)  # a second address of the loopback interface
    assert mine.startswith("127.")
    assert any(one.address == mine for one in psutil.net_if_addrs()[interface_towards("127.0.0.2", 1) or ""])
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert interface_towards("127.0.0.1", 1) is None


@pytest.mark.parametrize(
    ("chosen", "address", "expected"),
    [(None, "tcp", "inner"), ("", "tcp", "inner"), ("outer", "tcp", "outer"), (None, "file", None)],
)
def test_ranks_use_gloo_on_the_interface_towards_the_store_unless_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, address: str, expected: str | None
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen or "")  # so that what is set is undone
    if chosen is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(device, "interface_towards", lambda host, port: "inner")
    seen = []
    monkeypatch.setattr(
        device.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(device._INTERFACE))
    )
    store = serve_store("127.0.0.1", PATIENCE)
    where = f"tcp://127.0.0.1:{store.port}" if address == "tcp" else "file:///nowhere"
    device.init_process_group(0, 1, where, PATIENCE, torch.device("cpu"))
    assert seen == [expected]
