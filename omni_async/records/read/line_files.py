"""Reads a growing file of lines: returns what was added since the last read, and detects that it was rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from omni_async.config.reading import open_file, require_file
from omni_async.records.write.files import LONGEST_LINE

_BLOCK = 2**18
# Number of already read bytes that are compared with the file before more is read.
_TAIL = 256


class Block(NamedTuple):
    """Whole lines that were read together.

    offset: where the first line begins in the file. begins_region: the block does not follow the previous one."""

    offset: int
    lines: list[bytes]
    begins_region: bool = False


class GrowingFile:
    """A file that another process appends lines to.

    An incomplete last line waits for its rest. A resumed run truncates its ledger, replaces its metrics and starts a
    new spans file: the bytes just before the position reveal this, whatever the file's size and inode are by then.

    `newest_first`: on the first read of a larger file, this many bytes at its end are read before the rest.
    """

    def __init__(self, path: Path, newest_first: int | None = None) -> None:
        self.path = path
        self._within = path.parent
        self._newest_first = newest_first
        self._seen: tuple[int, int, int] | None = None
        self._position = 0
        self.restart()

    def restart(self) -> bool:
        """Forget what was read, so that it is read again. Return whether anything had been read."""
        had_something = self._position > 0
        self._position = 0
        self._tail = b""
        self.is_stuck = False  # at a line that no run writes
        self._earlier = (0, 0)  # the range before the part that was read first
        self._seen = None
        return had_something

    @property
    def is_behind(self) -> bool:
        """Return whether an earlier part of the file is still unread."""
        return self._earlier[0] < self._earlier[1]

    def changed(self) -> bool:
        """Return whether there may be something to read. Raises FileNotFoundError if there is no file."""
        require_file(self.path, self._within)
        found = self.path.stat()
        return (found.st_ino, found.st_size, found.st_mtime_ns) != self._seen or self.is_behind

    def was_rewritten(self) -> bool:
        """Return whether the file no longer continues what was read; then call `restart`."""
        with open_file(self.path, self._within) as file:
            return self._rewritten(file)

    def _rewritten(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_size < self._position:
            return True
        file.seek(self._position - len(self._tail))
        return file.read(len(self._tail)) != self._tail

    def blocks(self) -> Iterator[Block]:
        """Yield the added lines, some hundred at a time.

        Raises FileNotFoundError if there is no file, OSError if it cannot be read."""
        with open_file(self.path, self._within) as file:
            found = os.fstat(file.fileno())
            if not self._position and self._newest_first is not None and found.st_size > 2 * self._newest_first:
                file.seek(found.st_size - self._newest_first)
                file.readline(LONGEST_LINE)  # the rest of a line
                self._position = file.tell()
                self._earlier = (0, self._position)
            while (block := self._next(file, self._position, None)) is not None:
                self._position += sum(map(len, block.lines))
                self._tail = (self._tail + b"".join(block.lines))[-_TAIL:]
                yield block
            while self.is_behind:
                block = self._next(file, *self._earlier)
                if block is None:
                    break
                begins = not self._earlier[0]
                self._earlier = (self._earlier[0] + sum(map(len, block.lines)), self._earlier[1])
                yield block._replace(begins_region=begins)
            self._seen = (found.st_ino, found.st_size, found.st_mtime_ns)

    def _next(self, file: BinaryIO, start: int, end: int | None) -> Block | None:
        """Return whole lines from `start` on, at most up to `end`; None if no line is complete."""
        size = _BLOCK
        while True:
            file.seek(start)
            content = file.read(size if end is None else min(size, end - start))
            # Lines after a long line wait for the next block: a block has a bounded number of lines.
            whole = (content.rfind(b"\n") if size == _BLOCK else content.find(b"\n")) + 1
            if whole:
                return Block(start, [line + b"\n" for line in content[: whole - 1].split(b"\n")])
            if len(content) < size or size >= LONGEST_LINE:
                self.is_stuck = len(content) == size  # no run wrote it: do not read past it
                return None
            size *= 8
