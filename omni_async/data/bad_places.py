"""Collects the errors of the lines or rows of a file, so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omni_async.config import ConfigError

_SHOWN = 10
_LONGEST = 140  # characters of every reason but the first: an error message has at most 2000


class BadPlaces:
    """The wrong lines or rows of one file, by number; the first ten by number are shown."""

    def __init__(self, place: str) -> None:
        """Start empty; `place` is the word for a numbered part of the file."""
        self._place = place
        self._found: dict[int, tuple[str, str]] = {}
        self._numbers: set[int] = set()

    def add(self, where: str, number: int, problem: str) -> None:
        """Record a problem at the place with this number; `where` names the place with its file."""
        if number in self._numbers:
            return
        self._numbers.add(number)
        self._found[number] = (where, problem)
        if len(self._found) > 2 * _SHOWN:
            self._found = dict(sorted(self._found.items())[:_SHOWN])

    @contextmanager
    def noting(self, where: str, number: int) -> Iterator[None]:
        """Record the ConfigError that the body raises, which begins with `where`."""
        try:
            yield
        except ConfigError as error:
            self.add(where, number, str(error).removeprefix(f"{where}: "))

    def require_none(self, last: str | None = None, most: int = _SHOWN) -> None:
        """Raise ConfigError, one line, if there are any; `last` is the error that ended the file.

        `most`: how many to show, at most ten."""
        shown = sorted(self._found.items())[:most]
        if not shown:
            return
        (_, (where, problem)), *others = shown
        each = [f"{where}: {problem}", *(f"{self._place} {number}: {why[:_LONGEST]}" for number, (_, why) in others)]
        more = [f"and {len(self._numbers) - len(shown)} more"] if len(self._numbers) > len(shown) else []
        raise ConfigError("; ".join([*each, *more, *([last[-_LONGEST:]] if last is not None else [])]))
