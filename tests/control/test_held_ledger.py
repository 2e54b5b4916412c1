"""Tests that the ledger of a resumed run stays as it is until a group is trained."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_async.control.control_state import LedgerState
from omni_async.control.ledger import HeldBackSink, JsonlSink, Ledger, encode_line, extend
from omni_async.types import LedgerEntry, Terminal


def entry(group: int, event: Terminal = "trained") -> LedgerEntry:
    reason = None if event == "trained" else "zero reward variance"
    return LedgerEntry("run", group, 0, event, reason, 0, 1, 0, (0, 0), 1, 0.5)


def groups(path: Path) -> list[int]:
    return [msgspec.json.decode(line)["group"] for line in path.read_bytes().splitlines()]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Makes a ledger of two groups that a checkpoint counts, and two that it does not."""
    path = tmp_path / "ledger.jsonl"
    sink = JsonlSink(path)
    for group in (0, 1, 7, 8):
        sink(entry(group))
    return path


def counted(*entries: LedgerEntry) -> LedgerState:
    """Returns the checkpoint's totals of these lines."""
    lines, digest = [encode_line(one) for one in entries], ""
    for line in lines:
        digest = extend(digest, line)
    return LedgerState(len(lines), {"trained": len(lines)}, size=sum(map(len, lines)), digest=digest)


def two_lines(path: Path) -> JsonlSink:
    return JsonlSink(path, counted(entry(0), entry(1)))


def held(path: Path) -> HeldBackSink:
    return HeldBackSink(lambda: two_lines(path))


def test_groups_that_are_rejected_before_the_first_update_are_held_back(ledger: Path) -> None:
    before = ledger.read_bytes()
    sink = held(ledger)
    sink(entry(2, "rejected"))
    sink(entry(3, "dropped"))
    assert ledger.read_bytes() == before and not ledger.with_name("ledger.jsonl.void").exists()


def test_the_first_trained_group_makes_former_lines_void_and_brings_those_that_were_held(ledger: Path) -> None:
    sink = held(ledger)
    for one in (entry(2, "rejected"), entry(4), entry(3, "dropped")):
        sink(one)
    assert groups(ledger) == [0, 1, 2, 4, 3]
    assert groups(ledger.with_name("ledger.jsonl.void")) == [7, 8]


def test_a_checkpoint_counts_only_lines_that_are_in_the_file(ledger: Path) -> None:
    sink = held(ledger)
    sink(entry(2, "rejected"))
    sink.sync()
    assert groups(ledger) == [0, 1, 2]


def test_lines_that_were_changed_since_the_attempt_began_are_left_and_reported(ledger: Path) -> None:
    """Edits the lines while the run loads: it ends with that reason, in order."""
    sink = held(ledger)
    opened = Ledger(sink)
    changed = ledger.read_bytes().replace(b"trained", b"Trained", 1)
    ledger.write_bytes(changed)
    opened.admit(4)
    opened.end(entry(4))
    assert opened.problem is not None and "are not those that the checkpoint counts" in opened.problem
    with pytest.raises(OSError, match="are not those that the checkpoint counts"):
        sink.sync()
    assert ledger.read_bytes() == changed


def test_a_disk_that_is_full_when_lines_are_to_be_written_costs_none_of_them(ledger: Path) -> None:
    room = False

    def take_over() -> Any:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return two_lines(ledger)

    opened = Ledger(HeldBackSink(take_over))
    for group in (2, 4, 5):
        opened.admit(group)
    opened.end(entry(2, "rejected"))
    assert opened.problem is None
    opened.end(entry(4))
    assert opened.problem == "the ledger cannot be written: [Errno 28] No space left on device"
    assert groups(ledger) == [0, 1, 7, 8]
    room = True
    opened.end(entry(5))
    assert groups(ledger) == [0, 1, 2, 4, 5]
