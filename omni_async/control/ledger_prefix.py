"""Verifies the lines of a ledger that a checkpoint counts, so that no run goes on from lines that were damaged.

They are compared by their number of bytes and their digest. The digest is a chain, line by line: the one in a
checkpoint is enough to extend it. The lines are not read again to write a checkpoint, and a resumed run reads them
once. Lines end in a line feed and in nothing else.
"""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from omni_async.config.reading import open_file
from omni_async.control.control_state import LedgerState
from omni_async.types import LedgerEntry

_ENCODER = msgspec.json.Encoder()


class LedgerDamaged(ValueError):
    """The file does not begin with the lines that a checkpoint counts: the message says in one line what is wrong."""


def encode_line(entry: Any) -> bytes:
    """Encode an entry as the ledger's file holds it."""
    return _ENCODER.encode(entry) + b"\n"


def extend(digest: str, line: bytes) -> str:
    """Return the digest of the lines that `digest` covers ("": none) and this one more: xxh3, 128 bits, hexadecimal.

    It finds accidents, not forgeries."""
    return xxhash.xxh3_128_hexdigest(digest.encode() + line)


def require_prefix(path: Path, counted: LedgerState) -> None:
    """Read the file's first lines and compare them with those that were counted.

    Raises LedgerDamaged, or OSError if it cannot be read."""
    if not counted.lines and not counted.size:
        return
    if not counted.digest:
        raise LedgerDamaged(f"the checkpoint counts {counted.lines} lines of the ledger and does not say which")
    lines, size, digest = 0, 0, ""
    with contextlib.suppress(FileNotFoundError), open_file(path) as file:
        for line in islice(file, counted.lines):
            if not line.endswith(b"\n"):
                break  # cut off
            lines, size, digest = lines + 1, size + len(line), extend(digest, line)
    if lines < counted.lines:
        raise LedgerDamaged(f"the ledger has {lines} lines, the checkpoint counts {counted.lines}")
    if (size, digest) != (counted.size, counted.digest):
        found = _first_damage(path, counted.lines) or "lines are missing, doubled, swapped or changed"
        raise LedgerDamaged(
            f"the first {counted.lines} lines of the ledger are not those that the checkpoint counts: {found}"
        )


def _first_damage(path: Path, lines: int) -> str | None:
    """Describe the first damage that the lines alone show.

    A changed digit, or lines in another order, cannot be found so."""
    line_of: dict[int, int] = {}
    with open_file(path) as file:
        for number, line in enumerate(islice(file, lines), 1):
            if not line.strip():
                return f"line {number} is blank"
            try:
                entry = msgspec.json.decode(line, type=LedgerEntry)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return f"line {number} is no record of a group"
            if encode_line(entry) != line:
                return f"line {number} is not as it was written"
            if entry.group in line_of:
                return f"line {number} is of group {entry.group}, and so is line {line_of[entry.group]}"
            line_of[entry.group] = number
    return None
