"""Tests that the ledger is refused whatever happens to a line that a checkpoint counts, and not for changes after those
lines."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.control_state import LedgerState
from omni_async.control.ledger import JsonlSink, Ledger, LedgerDamaged, encode_line, extend, require_prefix
from omni_async.types import LedgerEntry

GROUPS, COUNTED = 6, 4


def entry(group: int) -> LedgerEntry:
    reason = None if group % 2 else "said \u2028 'no'\r\n and left"  # what other readers take for the end of a line
    event = "trained" if reason is None else "rejected"
    return LedgerEntry("run-1", group, group, event, reason, 0, 1, 0, (0, 0), 1, 0.25 * group)  # type: ignore[arg-type]


def states(sink: object = lambda _: None) -> list[LedgerState]:
    """Returns the state of a ledger before its first line and after each."""
    ledger = Ledger(sink)  # type: ignore[arg-type]
    known = [ledger.state()]
    for group in range(GROUPS):
        ledger.admit(group)
        ledger.end(entry(group))
        known.append(ledger.state())
    return known


LINES = [encode_line(entry(group)) for group in range(GROUPS)]
KNOWN = states()[COUNTED]
SIZE = sum(map(len, LINES[:COUNTED]))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Damages the counted lines of the ledger in one way."""
    lines, content = [*LINES], b"".join(LINES)
    line, other = draw(st.permutations(range(COUNTED)))[:2]
    byte = draw(st.integers(0, SIZE - 1))
    match draw(
        st.sampled_from(
            ["doubled", "missing", "swapped", "blank", "blanked", "flipped", "inserted", "removed", "cr", "crlf", "cut"]
        )
    ):
        case "doubled":
            lines.insert(other, lines[line])
        case "missing":
            del lines[line]
        case "swapped":
            lines[line], lines[other] = lines[other], lines[line]
        case "blank":
            lines.insert(line, draw(st.sampled_from([b"\n", b" \n", b"\r\n", b"\0\n"])))
        case "blanked":
            lines[line] = b"\n"
        case "flipped":
            return content[:byte] + bytes([content[byte] ^ draw(st.integers(1, 255))]) + content[byte + 1 :]
        case "inserted":
            return (
                content[:byte]
                + draw(st.binary(min_size=1, max_size=3).filter(lambda piece: set(piece) != {content[byte]}))
                + content[byte:]
            )
        case "removed":
            return content[:byte] + content[byte + 1 :]
        case "cr":
            return content[:byte] + b"\r" + content[byte + (content[byte : byte + 1] != b"\r") :]
        case "crlf":
            lines[line] = lines[line][:-1] + b"\r\n"
        case "cut":
            return content[:byte]
    return b"".join(lines)


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


def test_a_ledger_that_is_gone_or_no_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(LedgerDamaged, match="has 0 lines"):
        require_prefix(path, KNOWN)
    os.mkfifo(path)  # nobody will ever write to it
    for counted in (KNOWN, LedgerState()):
        with pytest.raises(OSError, match="a named pipe, not a file"):
            JsonlSink(path, counted)


def test_what_does_not_say_which_lines_it_counts_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", b"".join(LINES))
    with pytest.raises(LedgerDamaged, match="counts 4 lines of the ledger and does not say which"):
        require_prefix(path, msgspec.structs.replace(KNOWN, size=0, digest=""))


def test_the_file_and_what_is_known_of_it_agree_over_two_attempts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    states(JsonlSink(path))
    ledger = Ledger(JsonlSink(path, KNOWN), KNOWN)  # goes on without having read a line
    ledger.admit(99)
    ledger.end(entry(99))
    assert (ledger.state().size, ledger.state().lines) == (path.stat().st_size, COUNTED + 1)
    require_prefix(path, ledger.state())
    digest = ""
    for line in path.open("rb"):
        digest = extend(digest, line)
    assert ledger.state().digest == digest
