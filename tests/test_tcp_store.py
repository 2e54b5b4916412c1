"""Tests the store at which ranks meet; `training/test_pretended_npu.py` has ranks that do."""

from __future__ import annotations

from omni_async.tcp_store import join_store, serve_store
from tests.patience import PATIENCE
from tests.ports import listening_at


def test_a_store_listens_at_one_address_for_as_long_as_it_is_kept() -> None:
    store = serve_store("127.0.0.1", PATIENCE)
    port = store.port
    assert listening_at(port) == ["127.0.0.1"]
    join_store("127.0.0.1", port, PATIENCE).set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening_at(port) == []
