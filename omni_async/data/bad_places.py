"""Collects the errors of the lines or rows of a file, so that all of them are reported at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from omni_async.config import ConfigError

_SHOWN = 10
_NUMBERS = 5  # further places of the same problem that are named
_GOT = re.compile(r"(?<=, got ).*?(?=;|$)", re.DOTALL)
_LONGEST = 140  # characters of every reason but the first
_PLACED = 3  # problems whose further places are named
_LONGEST_MESSAGE = 1900  # ConfigError cuts a message after 2000, and the end has the number of the others


@dataclass
class _Alike:
    """The places of one kind of problem. `where` and `problem` are of the first; `numbers` are of the first few."""

    where: str
    problem: str
    numbers: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, where: str, number: int, problem: str) -> None:
        if not self.numbers or number < self.numbers[0]:
            self.where, self.problem = where, problem
        self.numbers = sorted([*self.numbers, number])[: 1 + _NUMBERS]
        self.count += 1

    def others(self, place: str) -> str:
        """Return the other places, in parentheses; empty if there are none."""
        if self.count == 1:
            return ""
        more = ", ..." if self.count > len(self.numbers) else ""
        return f" (also {self.count - 1} more: {place} {', '.join(map(str, self.numbers[1:]))}{more})"


def kind_of(problem: str) -> str:
    """Return the problem without the value that a row has: a column of another type is one problem, not one per row."""
    return _GOT.sub("", problem)


class BadPlaces:
    """The wrong lines or rows of one file, by problem; the first ten problems by number are shown."""

    def __init__(self, place: str) -> None:
        """Start empty; `place` is the word for a numbered part of the file."""
        self._place = place
        self._found: dict[str, _Alike] = {}
        self._numbers: set[int] = set()

    def add(self, where: str, number: int, problem: str) -> None:
        """Record a problem at the place with this number; `where` names the place with its file."""
        if number in self._numbers:
            return
        self._numbers.add(number)
        self._found.setdefault(kind_of(problem), _Alike(where, problem)).add(where, number, problem)
        if len(self._found) > 2 * _SHOWN:
            self._found = {kind_of(one.problem): one for one in self._sorted()[:_SHOWN]}

    def _sorted(self) -> list[_Alike]:
        return sorted(self._found.values(), key=lambda one: one.numbers[0])

    @contextmanager
    def noting(self, where: str, number: int) -> Iterator[None]:
        """Record the ConfigError that the body raises, which begins with `where`."""
        try:
            yield
        except ConfigError as error:
            self.add(where, number, str(error).removeprefix(f"{where}: "))

    def require_none(self, last: str | None = None, most: int = _SHOWN) -> None:
        """Raise ConfigError, one line, if there are any; `last` is the error that ended the file.

        `most`: how many problems to show, at most ten."""
        shown = self._sorted()[:most]
        if not shown:
            return
        first, *others = shown
        more = [
            f"{self._place} {one.numbers[0]}: {one.problem[:_LONGEST]}{one.others(self._place) if i < _PLACED else ''}"
            for i, one in enumerate(others, 1)
        ]
        if left := len(self._numbers) - sum(one.count for one in shown):
            more.append(f"and {left} more")
        if last is not None:
            more.append(last[-_LONGEST:])
        places = "; ".join([first.others(self._place), *more])
        raise ConfigError(f"{first.where}: {first.problem}"[: _LONGEST_MESSAGE - len(places)] + places)
