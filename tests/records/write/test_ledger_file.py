"""Tests that the ledger's file of a resumed run is as it was until a group is trained, and that it is refused whatever
happens to a line that a checkpoint counts."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.control_state import LedgerState
from omni_async.control.ledger import Ledger, encode_line, extend
from omni_async.records.write.ledger_file import JsonlSink, LedgerDamaged, require_prefix
from omni_async.types import LedgerEntry
from tests.control.test_ledger import entry


def opened(sink: Callable[[LedgerEntry], None], *live: int, start: LedgerState | None = None) -> Ledger:
    """Make a ledger with these groups admitted."""
    ledger = Ledger(sink, start)
    for group in live:
        ledger.admit(group)
    return ledger


def groups(path: Path) -> list[int]:
    return [msgspec.json.decode(line)["group"] for line in path.read_bytes().splitlines()]


def test_a_line_is_in_the_file_at_once_and_on_the_disk_when_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "ledger.jsonl", list[os.stat_result]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle)))
    sink = JsonlSink(path)
    sink(entry(0))
    assert path.read_text() == (
        '{"run":"run-1","group":0,"prompt":3,"event":"trained","reason":null,"admitted_version":0,"trained_version":1,'
        '"staleness":0,"step_versions":[0,0],"attempts":1,"reward":0.5,"left_out":[],"text":""}\n'
    )
    sink(entry(1, "dropped", reason='said "no"\nand left'))
    JsonlSink(path)(entry(2))
    assert groups(path) == [0, 1, 2], "a second writer appends"
    assert not synced, "training does not wait for the disk"
    sink.sync()
    [found] = synced
    assert os.path.samestat(found, path.stat()) and found.st_size == path.stat().st_size


class Disk:
    """A disk that is full until `room`, and then takes five bytes at a time."""

    content, room = b"", False

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.content += data[:5]
        return len(data[:5])


def test_a_line_that_could_not_be_written_comes_before_the_next_and_the_books_stay_right(tmp_path: Path) -> None:
    sink, disk = JsonlSink(tmp_path / "ledger.jsonl"), Disk()
    sink._file = disk  # type: ignore[assignment]
    ledger = opened(sink, 0, 1)
    ledger.end(entry(0))
    assert ledger.problem == "the ledger cannot be written: [Errno 28] No space left on device"
    assert ledger.counters()["trained"] == 1 and ledger.live == {1}
    with pytest.raises(OSError, match="No space"):
        sink.sync()
    disk.room = True
    ledger.end(entry(1))
    assert [json.loads(line)["group"] for line in disk.content.splitlines()] == [0, 1]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Makes a ledger of two groups that a checkpoint counts, and two that it does not."""
    sink = JsonlSink(path := tmp_path / "ledger.jsonl")
    for group in (0, 1, 7, 8):
        sink(entry(group))
    return path


def held(path: Path, take_over: Callable[[], None] = lambda: None) -> JsonlSink:
    """Returns a sink for a checkpoint that counts the first two lines; nothing is written before a group is trained."""
    before = opened(lambda _: None, 0, 1)
    for group in (0, 1):
        before.end(entry(group))
    return JsonlSink(path, before.state(), take_over)


@pytest.mark.parametrize("how", ["trained", "synced"])
def test_groups_are_held_back_until_the_first_is_trained_or_a_checkpoint_counts_them(ledger: Path, how: str) -> None:
    before, sink = ledger.read_bytes(), held(ledger)
    sink(entry(2, "rejected"))
    assert ledger.read_bytes() == before and not ledger.with_name("ledger.jsonl.void").exists()
    sink(entry(4)) if how == "trained" else sink.sync()
    sink(entry(3, "dropped"))
    assert groups(ledger) == ([0, 1, 2, 4, 3] if how == "trained" else [0, 1, 2, 3])
    assert groups(ledger.with_name("ledger.jsonl.void")) == [7, 8], "former lines"


def test_lines_that_were_changed_since_the_attempt_began_are_left_and_reported(ledger: Path) -> None:
    books = opened(sink := held(ledger), 4)
    changed = ledger.read_bytes().replace(b"trained", b"Trained", 1)
    ledger.write_bytes(changed)
    books.end(entry(4))
    assert books.problem is not None and "differ from the lines that the checkpoint counts" in books.problem
    with pytest.raises(OSError, match="differ from the lines that the checkpoint counts"):
        sink.sync()
    assert ledger.read_bytes() == changed


def test_a_disk_that_is_full_when_lines_are_to_be_written_costs_none_of_them(ledger: Path) -> None:
    room = False

    def take_over() -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")

    books = opened(held(ledger, take_over), 2, 4, 5)
    books.end(entry(2, "rejected"))
    assert books.problem is None
    books.end(entry(4))
    assert books.problem == "the ledger cannot be written: [Errno 28] No space left on device"
    assert groups(ledger) == [0, 1, 7, 8]
    room = True
    books.end(entry(5))
    assert groups(ledger) == [0, 1, 2, 4, 5]


GROUPS, COUNTED = 6, 4


def odd_entry(group: int) -> LedgerEntry:
    reason = None if group % 2 else "said \u2028 'no'\r\n and left"  # what other readers take for the end of a line
    return entry(group, "trained" if reason is None else "rejected", reason)


LINES = [encode_line(odd_entry(group)) for group in range(GROUPS)]
SIZE = sum(map(len, LINES[:COUNTED]))


def filled(sink: Callable[[LedgerEntry], None], count: int) -> LedgerState:
    """Returns the state of a ledger after so many lines."""
    ledger = opened(sink, *range(count))
    for group in range(count):
        ledger.end(odd_entry(group))
    return ledger.state()


KNOWN = filled(lambda _: None, COUNTED)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Damages the counted lines of the ledger in one way."""
    content, byte = b"".join(LINES), draw(st.integers(0, SIZE - 1))
    before, after = content[:byte], content[byte:]
    line, other = draw(st.permutations(range(COUNTED)))[:2]
    first, this, rest = LINES[:line], LINES[line], LINES[line + 1 :]
    swapped = {line: LINES[other], other: this}
    piece = st.binary(min_size=1, max_size=3).filter(lambda piece: set(piece) != {content[byte]})
    ways = {
        "doubled": [*LINES[:other], this, *LINES[other:]],
        "missing": [*first, *rest],
        "swapped": [swapped.get(number, text) for number, text in enumerate(LINES)],
        "blank": [*first, draw(st.sampled_from([b"\n", b" \n", b"\r\n", b"\0\n"])), this, *rest],
        "blanked": [*first, b"\n", *rest],
        "crlf": [*first, this[:-1] + b"\r\n", *rest],
        "flipped": [before, bytes([content[byte] ^ draw(st.integers(1, 255))]), after[1:]],
        "inserted": [before, draw(piece), after],
        "removed": [before, after[1:]],
        "cr": [before, b"\r", after[1:]],
        "cut": [before],
    }
    return b"".join(ways[draw(st.sampled_from(sorted(ways)))])


@settings(max_examples=300, deadline=None)
@given(content=damaged())
def test_one_thing_done_to_the_counted_lines_is_found(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp() / "damaged.jsonl", content)
    if content[:SIZE] == b"".join(LINES)[:SIZE]:
        return  # a carriage return that was put where one stood
    with pytest.raises(LedgerDamaged) as found:
        require_prefix(path, KNOWN)
    assert "\n" not in str(found.value) and len(str(found.value)) < 300
    with pytest.raises(LedgerDamaged):
        JsonlSink(path, KNOWN)
    assert path.read_bytes() == content, "nothing is cut off what was refused"


@settings(max_examples=50, deadline=None)
@given(rest=st.binary(max_size=40))
def test_what_follows_the_counted_lines_is_void_whatever_it_is(
    tmp_path_factory: pytest.TempPathFactory, rest: bytes
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "followed.jsonl", b"".join(LINES[:COUNTED]) + rest)
    void = path.with_name("followed.jsonl.void")
    void.unlink(missing_ok=True)
    require_prefix(path, KNOWN)
    JsonlSink(path, KNOWN)
    assert path.read_bytes() == b"".join(LINES[:COUNTED])
    assert (void.read_bytes() if void.exists() else b"") == rest


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([0, 1, 1, 2, 3], "line 3 is of group 1, and so is line 2"),
        ([0, 1, b"\n", 2, 3], "line 3 is blank"),
        ([0, 1, b'{"run": 3}\n', 3, 4], "line 3 is no record of a group"),
        ([0, LINES[1].replace(b"\n", b"\r\n"), 2, 3], "line 2 is not as it was written"),
        ([0, 2, 1, 3], "lines are missing, doubled, swapped or changed"),
        ([0, 1, 2], "the ledger has 3 lines, the checkpoint counts 4"),
        ([0, 1, 2, LINES[3][:-1]], "the ledger has 3 lines, the checkpoint counts 4"),
        ([], "the ledger has 0 lines, the checkpoint counts 4"),
    ],
)
def test_the_first_damaged_line_is_named_where_it_can_be_told(
    tmp_path: Path, lines: list[int | bytes], reason: str
) -> None:
    path = write(tmp_path / "ledger.jsonl", b"".join(LINES[line] if isinstance(line, int) else line for line in lines))
    with pytest.raises(LedgerDamaged, match=reason):
        require_prefix(path, KNOWN)


def test_files_that_cannot_be_the_ledger_are_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", b"".join(LINES))
    with pytest.raises(LedgerDamaged, match="counts 4 lines of the ledger without their digest"):
        require_prefix(path, msgspec.structs.replace(KNOWN, size=0, digest=""))
    os.truncate(path, 2**29)
    with pytest.raises(OSError, match="bytes follow the lines that the checkpoint counts"):
        JsonlSink(path, LedgerState(admitted=0, events={}))
    assert [*tmp_path.iterdir()] == [path]
    path.unlink()
    os.mkfifo(path)  # nobody will ever write to it
    for counted in (KNOWN, LedgerState()):
        with pytest.raises(OSError, match="a named pipe, not a file"):
            JsonlSink(path, counted)


def test_the_file_and_what_is_known_of_it_agree_over_two_attempts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    filled(JsonlSink(path), GROUPS)
    ledger = opened(JsonlSink(path, KNOWN), 99, start=KNOWN)  # without having read a line
    ledger.end(odd_entry(99))
    state = ledger.state()
    assert (state.size, state.lines) == (path.stat().st_size, COUNTED + 1)
    require_prefix(path, state)
    assert state.digest == reduce(extend, path.open("rb"), "")
