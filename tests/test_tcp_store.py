"""Tests the store at which ranks meet; `training/test_pretended_npu.py` has ranks that do."""

from __future__ import annotations

import psutil

from omni_async.tcp_store import join_store, serve_store
from tests.patience import PATIENCE


def test_a_store_listens_at_one_address_for_as_long_as_it_is_kept() -> None:
    store = serve_store("127.0.0.1", PATIENCE)
    port = store.port
    assert addresses_at(port) == ["127.0.0.1"]
    join_store("127.0.0.1", port, PATIENCE).set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert addresses_at(port) == []


def addresses_at(port: int) -> list[str]:
    listening = (one for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN)
    return [one.laddr.ip for one in listening if one.laddr.port == port]
