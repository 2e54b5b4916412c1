"""Tests that every admitted group ends in exactly one event, and that the counters match."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_async.control.ledger import ConservationError, JsonlSink, Ledger
from omni_async.types import LedgerEntry


def entry(group: int, event: str = "trained", **values: Any) -> LedgerEntry:
    plain: dict[str, Any] = {
        "run": "run-1",
        "group": group,
        "prompt": 3,
        "event": event,
        "reason": None,
        "admitted_version": 0,
        "trained_version": 1 if event == "trained" else None,
        "staleness": 0 if event == "trained" else None,
        "step_versions": (0, 0),
        "attempts": 1,
        "reward": 0.5,
    }
    return msgspec.convert({**plain, **values}, LedgerEntry)


def test_admitted_groups_are_trained_rejected_dropped_or_live() -> None:
    recorded: list[LedgerEntry] = []
    ledger = Ledger(recorded.append)
    for group in range(4):
        ledger.admit(group)
    events = [
        entry(2, "rejected", reason="zero reward variance"),
        entry(0),
        entry(1, "dropped", reason="run interrupted"),
    ]
    for event in events:
        ledger.end(event)
    assert recorded == events, "recorded at once and in order"
    assert ledger.counters() == {"admitted": 4, "trained": 1, "rejected": 1, "dropped": 1, "live": 1}
    assert ledger.live == {3}
    assert dict(ledger.reasons) == {"zero reward variance": 1, "run interrupted": 1}
    assert dict(ledger.staleness) == {0: 1}
    ledger.check({3})


def test_a_group_ends_once() -> None:
    ledger = Ledger(lambda _: None)
    ledger.admit(0)
    ledger.end(entry(0))
    with pytest.raises(ConservationError, match="group 0 is rejected but not live"):
        ledger.end(entry(0, "rejected"))
    with pytest.raises(ConservationError, match="group 7 is trained but not live"):
        ledger.end(entry(7))


def test_a_group_is_admitted_once() -> None:
    ledger = Ledger(lambda _: None)
    ledger.admit(4)
    for group in (4, 3):
        with pytest.raises(ConservationError, match=f"group {group} admitted twice"):
            ledger.admit(group)


@pytest.mark.parametrize("live", [set(), {0, 1, 2}, {0, 2}])
def test_books_that_disagree_about_live_groups_are_an_error(live: set[int]) -> None:
    ledger = Ledger(lambda _: None)
    ledger.admit(0)
    ledger.admit(1)
    ledger.check({0, 1})
    with pytest.raises(ConservationError, match="disagree on groups"):
        ledger.check(live)


def test_a_line_is_on_disk_as_soon_as_the_event_happened(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    sink = JsonlSink(path)
    sink(entry(0))
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        "run": "run-1",
        "group": 0,
        "prompt": 3,
        "event": "trained",
        "reason": None,
        "admitted_version": 0,
        "trained_version": 1,
        "staleness": 0,
        "step_versions": [0, 0],
        "attempts": 1,
        "reward": 0.5,
    }
    sink(entry(1, "dropped", reason='said "no"\nand left'))
    assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == [0, 1]
    JsonlSink(path)(entry(2))
    assert len(path.read_text().splitlines()) == 3, "a second writer appends"
    assert msgspec.json.decode(path.read_bytes().splitlines()[0], type=LedgerEntry) == entry(0)


class Disk:
    """A disk that is full until `room`, and then takes five bytes at a time."""

    def __init__(self) -> None:
        self.content = b""
        self.room = False

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.content += data[:5]
        return len(data[:5])


def test_lines_that_a_checkpoint_will_count_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: synced.append((Path(f"/proc/self/fd/{handle}").readlink(), os.fstat(handle).st_size)),
    )
    sink = JsonlSink(path := tmp_path / "ledger.jsonl")
    for group in range(3):
        sink(entry(group))
    assert not synced, "training does not wait for the disk"
    sink.sync()
    assert synced == [(path, path.stat().st_size)]


def test_a_line_that_could_not_be_written_comes_before_the_next_and_the_books_stay_right(tmp_path: Path) -> None:
    sink, disk = JsonlSink(tmp_path / "ledger.jsonl"), Disk()
    sink._file = disk  # type: ignore[assignment]
    ledger = Ledger(sink)
    for group in range(2):
        ledger.admit(group)
    ledger.end(entry(0))
    assert ledger.problem == "the ledger cannot be written: [Errno 28] No space left on device"
    assert ledger.counters()["trained"] == 1 and ledger.live == {1}
    with pytest.raises(OSError, match="No space"):
        sink.sync()
    disk.room = True
    ledger.end(entry(1))
    assert [json.loads(line)["group"] for line in disk.content.splitlines()] == [0, 1]
