"""Tests that a worker's name says which it is, and reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.worker import Worker

WORKERS = st.builds(
    Worker, st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.none() | st.integers(0, 9999), st.integers(1, 99)
)


@given(WORKERS)
def test_names_read_back(worker: Worker) -> None:
    assert Worker.parse(str(worker)) == worker
    assert Worker.parse(worker.slot) == worker.numbered(1)


@pytest.mark.parametrize(
    ("name", "worker", "slot"),
    [
        ("trainer", Worker("trainer"), "trainer"),
        ("rollout-12.3", Worker("rollout", 12, 3), "rollout-12"),
        ("trainer.2", Worker("trainer", None, 2), "trainer"),
        ("Ray of another", Worker("Ray of another"), "Ray of another"),
        ("0", Worker("0"), "0"),
    ],
)
def test_names(name: str, worker: Worker, slot: str) -> None:
    assert Worker.parse(name) == worker and worker.slot == slot and str(worker) == name
