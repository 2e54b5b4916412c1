"""Checks the boxes of a video or sound file before a library opens it.

They must fit into the file, and its tables into memory. A few bytes of an MP4 can list a billion empty frames; each
takes memory as soon as the file is opened. A truncated file has boxes that end behind its end.
"""

from __future__ import annotations

import os
import re
from typing import BinaryIO

from omni_async.config import ConfigError

_MOST_BOXES = 2**14  # at the top level: a fragment has two
_MOST_TABLES = 2**26  # bytes of all boxes of an MP4 but its media data
_MOST_ENTRIES = 10_000_000  # in all sample tables of an MP4 together
_CUT = "cut off: it has {have} bytes, its header declares {wants}; copy it again"
# Tables whose entries may have no bytes; the number of entries follows the name.
_SIZES, _TIMES, _FRAGMENT = re.compile(rb"stsz|stz2"), re.compile(rb"stts|ctts"), re.compile(rb"trun")
# Programs that write a WAV into a pipe do not know its length, and declare at least this.
_ENDLESS = 0x7FFF0000
_EBML, _SEGMENT = 0x1A45DFA3, 0x18538067


def require_whole(file: BinaryIO) -> None:
    """Raise ConfigError if the file is cut off, or lists more than it can hold. Ignores other formats."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    begin = file.read(12)
    if begin[:4] == b"RIFF":
        _riff(file, size, begin[8:] == b"WAVE")
    elif begin[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"styp", b"pnot"):
        _mp4(file, size)
    elif int.from_bytes(begin[:4]) == _EBML:
        _matroska(file, size)
    file.seek(0)


def _riff(file: BinaryIO, size: int, wave: bool) -> None:
    """Check the chunks of a WAV up to its data, or the top-level chunks of an AVI."""
    place = 12 if wave else 0
    for _ in range(_MOST_BOXES):
        file.seek(place)
        header = file.read(8)
        if len(header) < 8:
            return
        length = int.from_bytes(header[4:], "little")
        end = place + 8 + length
        if wave and header[:4] == b"data" and length >= _ENDLESS:
            return
        if end > size and (not wave or header[:4] == b"data"):
            raise ConfigError(_CUT.format(have=size, wants=end))
        if wave and header[:4] == b"data":
            return
        place = end + end % 2
    raise ConfigError(f"more than {_MOST_BOXES} chunks")


def _mp4(file: BinaryIO, size: int) -> None:
    place = entries = looked = 0
    for _ in range(_MOST_BOXES):
        file.seek(place)
        header = file.read(16)
        if len(header) < 8:
            return
        length, kind = int.from_bytes(header[:4]), header[4:8]
        length = int.from_bytes(header[8:16]) if length == 1 else length or size - place
        if length < 8:
            raise ConfigError("a box of the file is damaged")
        if place + length > size:
            raise ConfigError(_CUT.format(have=size, wants=place + length))
        if kind != b"mdat":
            looked += length
            if looked > _MOST_TABLES:
                raise ConfigError(f"more than {_MOST_TABLES} bytes that are not media")
            file.seek(place)
            entries += _entries(file.read(length))
            if entries > _MOST_ENTRIES:
                raise ConfigError(f"its index lists {entries} entries, at most {_MOST_ENTRIES} are read")
        place += length
    raise ConfigError(f"more than {_MOST_BOXES} boxes; write it without fragments")


def _entries(boxes: bytes) -> int:
    """Return the total number of entries that tables list anywhere in some boxes."""
    if b"cmov" in boxes:
        raise ConfigError("its index is compressed; write it again")
    found = sum(int.from_bytes(boxes[at.end() + 8 : at.end() + 12]) for at in _SIZES.finditer(boxes))
    found += sum(int.from_bytes(boxes[at.end() + 4 : at.end() + 8]) for at in _FRAGMENT.finditer(boxes))
    for at in _TIMES.finditer(boxes):
        count = int.from_bytes(boxes[at.end() + 4 : at.end() + 8])
        table = boxes[at.end() + 8 : at.end() + 8 + 8 * count]
        found += sum(int.from_bytes(table[i : i + 4]) for i in range(0, len(table), 8))
    return found


def _matroska(file: BinaryIO, size: int) -> None:
    place = 0
    for _ in range(_MOST_BOXES):
        file.seek(place)
        header = file.read(12)
        if not header:
            return
        kind, at = _number(header, 0, keep=True)
        length, at = _number(header, at, keep=False)
        if length < 0 or (kind not in (_EBML, _SEGMENT) and place == 0):
            return  # a stream of unknown length
        place += at + length
        if place > size:
            raise ConfigError(_CUT.format(have=size, wants=place))
    raise ConfigError(f"more than {_MOST_BOXES} elements")


def _number(header: bytes, at: int, keep: bool) -> tuple[int, int]:
    """Return an EBML number and its end; `keep` retains the bit that marks its length; -1 for an unknown number."""
    first = header[at] if at < len(header) else 0
    length = 9 - first.bit_length()
    if length > 8:
        raise ConfigError("an element of the file is damaged")
    number = int.from_bytes(header[at : at + length])
    value = number if keep else number & ((1 << 7 * length) - 1)
    return (-1 if not keep and value == (1 << 7 * length) - 1 else value), at + length
