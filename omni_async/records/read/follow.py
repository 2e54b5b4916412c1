"""Follows a run folder: reads what was added to its files since the last poll, and keeps it in little memory.

It waits for nothing and starts nothing. `poll` is an iterator that does a few milliseconds' work at a time, so that an
event loop can handle other work in between. A resumed run rewrites its files; they are then read again from the start.
When a run ends, its timeline replaces `spans.jsonl`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from omni_async.config.reading import open_file
from omni_async.control.rounds import Round
from omni_async.records.read.columns import Columns
from omni_async.records.read.line_files import Block, GrowingFile
from omni_async.records.read.record import is_there, names_in, reason_of, run_config
from omni_async.records.read.rounds import is_round, read_round
from omni_async.records.read.rows import Records, Rows
from omni_async.records.read.spans import Placed, SpanLine, SpanStore, Where
from omni_async.records.read.trace_file import NotATrace, TraceEvent, trace_spans
from omni_async.records.write.attempts import Attempt, Fault
from omni_async.records.write.files import LONGEST_LINE, decode_line, read_foreign
from omni_async.records.write.rundir import Resumption, RunDirectory
from omni_async.records.write.summary import Summary, read_summary
from omni_async.types import LedgerEntry, Span, count

T = TypeVar("T")

EVENTS = ("trained", "rejected", "dropped")
_NONE = -1
_NO_GROUP = 2**31 - 1
_GROUP = np.dtype(
    [
        ("group", "i4"),
        ("prompt", "i4"),
        ("event", "u1"),  # position in EVENTS
        ("reason", "i4"),  # position in `Ended.reasons`, -1: none
        ("admitted", "i4"),
        ("trained", "i4"),  # -1: not trained
        ("staleness", "i4"),  # -1: not trained
        ("reward", "f8"),  # NaN: no score
        ("offset", "i8"),  # of its line in the ledger
        ("size", "u4"),
    ]
)
# Bytes of spans, and about as many blocks of them, read before anything else, because they are viewed first.
_NEWEST_SPANS = 2**21
_FIRST_BLOCKS = 9
# Number of distinct reason texts; further reasons are only in the ledger.
_MOST_REASONS = 10_000
_OTHER = "another reason"
_LONGEST_REASON = 200
# Maximum bytes of lines of validation rounds kept.
_MOST_OF_ROUNDS = 2**25
_SAMPLE_FILE = re.compile(r"(train|validation)-(\d{6,9})\.jsonl")


class Ended:
    """The finished groups, as read from the ledger."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._rows = Rows(_GROUP)
        self._reason_of: dict[str, int] = {}
        self.reasons: list[str] = []
        self.events: Counter[str] = Counter()
        self._why: dict[str, Counter[int]] = {event: Counter() for event in EVENTS}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, entries: Sequence[tuple[LedgerEntry, int, int]]) -> None:
        """Add entries, each with the place and the size of its line."""
        rows = []
        for one, offset, size in entries:
            reason = _NONE if one.reason is None else self._reason(one.reason)
            if reason != _NONE:
                self._why[one.event][reason] += 1
            self.events[one.event] += 1
            reward = np.nan if one.reward is None else one.reward
            trained = _NONE if one.trained_version is None else one.trained_version
            staleness = _NONE if one.staleness is None else one.staleness
            event = EVENTS.index(one.event)
            rows.append(
                (one.group, one.prompt, event, reason, one.admitted_version, trained, staleness, reward, offset, size)
            )
        if rows:
            self._rows.extend(rows)

    def _reason(self, text: str) -> int:
        text = text[:_LONGEST_REASON]
        if len(self.reasons) >= _MOST_REASONS and text not in self._reason_of:
            text = _OTHER
        if text not in self._reason_of:
            self._reason_of[text] = len(self.reasons)
            self.reasons.append(text)
        return self._reason_of[text]

    def why(self, event: str) -> dict[str, int]:
        """Return the reasons of the groups with this ending -> their number."""
        return {self.reasons[reason]: number for reason, number in self._why[event].items()}

    def all(self) -> Records:
        """Return a copy of the rows, in the order of the ledger."""
        return self._rows.all()

    def newest(self, number: int) -> Records:
        """Return the rows of the groups that ended last, oldest first."""
        found: list[Records] = []
        for chunk in reversed([*self._rows.chunks()]):
            found.insert(0, chunk[-number:] if number > 0 else chunk[:0])
            number -= len(found[0])
            if number <= 0:
                break
        return np.concatenate(found) if found else np.empty(0, _GROUP)

    def find(self, group: int) -> tuple[int, int] | None:
        """Return the place and the size of a group's line in the ledger; None if it has not ended."""
        for chunk in self._rows.chunks():
            found = np.flatnonzero(chunk["group"] == group)
            if len(found):
                row = chunk[found[-1]]
                return int(row["offset"]), int(row["size"])
        return None

    def next_of(self, prompt: int, group: int) -> int | None:
        """Return the first finished group of a prompt after the given group; None if none has finished."""
        found = [
            int(chunk["group"][(chunk["prompt"] == prompt) & (chunk["group"] > group)].min(initial=_NO_GROUP))
            for chunk in self._rows.chunks()
        ]
        first = min(found, default=_NO_GROUP)
        return None if first == _NO_GROUP else first


class Follower:
    """The content of a run folder, as of the last `poll`.

    `config`: config.yaml as plain data. `updates`, `rounds`: the content of the two kinds of metrics lines. `changes`
    counts changes of any content."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        self.config: dict[str, Any] = {}
        self.updates = Columns()
        self.rounds: list[Round] = []
        self._of_rounds = 0
        self.ended = Ended()
        self.spans = SpanStore()
        self.faults: list[Fault] = []
        self.attempts: list[Attempt] = []
        self.summary: Summary | None = None
        self.samples: list[tuple[str, int]] = []
        self.changes = 0
        self._cut: Counter[str] = Counter()  # file -> number of invalid lines
        self.left_out: dict[str, str] = {}  # file -> why it is missing
        self._metrics_file = GrowingFile(self.run.metrics)
        self._ledger_file = GrowingFile(self.run.ledger)
        self._spans_file = GrowingFile(self.run.spans, _NEWEST_SPANS)
        self._stats: dict[Path, Any] = {}
        self._resumption: Resumption | None = None
        self._spans_source: Path = self.run.spans
        self._entry = msgspec.json.Decoder(LedgerEntry)
        self._line = msgspec.json.Decoder(dict[str, Any])
        self._span = msgspec.json.Decoder(SpanLine)

    @property
    def lines_cut(self) -> int:
        """Return the number of invalid lines in the files."""
        return self._cut.total()

    @property
    def problem(self) -> str | None:
        """Report which files of the folder cannot be read; None if all can."""
        found = [f"{name}: {why}" for name, why in self.left_out.items()]
        found += [f"{name}: {lines} line{'s' * (lines > 1)} cannot be read" for name, lines in self._cut.items()]
        return "; ".join(found) or None

    @property
    def is_behind(self) -> bool:
        """Return whether an earlier part of the spans is still unread."""
        return self._spans_file.is_behind

    def poll(self) -> Iterator[None]:
        """Read everything that is new; yields after every few milliseconds' work."""
        self._small_files()
        yield
        spans = self._follow_spans()
        yield from islice(spans, _FIRST_BLOCKS)
        yield from self._follow(self._ledger_file, self._ledger, self.ended.clear)
        yield from self._follow(self._metrics_file, self._metrics, self._forget_metrics)
        yield from spans

    # ---- files of lines ---------------------------------------------------------------------------------------------

    def _follow(self, file: GrowingFile, take: Callable[[Block], None], forget: Callable[[], None]) -> Iterator[None]:
        name = file.path.name
        try:
            if not file.changed():
                return
            self.left_out.pop(name, None)
            if file.was_rewritten():
                self._restart(file, forget)
            for block in file.blocks():
                take(block)
                self.changes += 1
                yield
            if file.is_stuck:
                self.left_out[name] = f"a line has more than {LONGEST_LINE} bytes; nothing is read from there on"
        except FileNotFoundError:
            self.left_out.pop(name, None)
            self._restart(file, forget)
        except OSError as error:
            self.left_out[name] = f"cannot be read: {reason_of(error)}"
            self._restart(file, forget)

    def _restart(self, file: GrowingFile, forget: Callable[[], None]) -> None:
        self._cut.pop(file.path.name, None)
        if file.restart():
            forget()
            self.changes += 1

    def _metrics(self, block: Block) -> None:
        for line in block.lines:
            try:
                record = decode_line(line, self._line)
            except (ValueError, RecursionError):
                self._cut[self.run.metrics.name] += 1
                continue
            number = count(record.get("update"))
            if number is not None and self._resumption is not None and not self._resumption.counts(record):
                continue
            if is_round(record):
                self._of_rounds += len(line) + _LONGEST_REASON
                if self._of_rounds < _MOST_OF_ROUNDS:
                    self.rounds.append(read_round(record))
                    continue
            elif number is not None and self.updates.add(record):
                continue
            self._cut[self.run.metrics.name] += 1

    def _forget_metrics(self) -> None:
        self.updates.clear()
        self.rounds.clear()
        self._of_rounds = 0

    def _ledger(self, block: Block) -> None:
        entries = []
        offset = block.offset
        for line in block.lines:
            try:
                entries.append((decode_line(line, self._entry), offset, len(line)))
            except (ValueError, RecursionError):
                self._cut[self.run.ledger.name] += 1
            offset += len(line)
        if self._resumption is not None:
            entries = entries[: max(0, self._resumption.groups - len(self.ended))]
        self.ended.add(entries)

    # ---- spans ------------------------------------------------------------------------------------------------------

    def _follow_spans(self) -> Iterator[None]:
        if is_there(self.run.spans, self.run.path, self.left_out):
            if self._spans_source != self.run.spans:  # the run was resumed: the timeline is the previous attempt's
                self._spans_source = self.run.spans
                self._forget_spans()
            yield from self._follow(self._spans_file, self._take_spans, self.spans.clear)
        elif self._has_changed(self.run.trace) and is_there(self.run.trace, self.run.path, self.left_out):
            self._spans_source = self.run.trace
            self._forget_spans()
            self.left_out.pop(self.run.trace.name, None)
            try:
                for placed in trace_spans(self.run.trace):
                    self.spans.add(placed)
                    self.changes += 1
                    yield
            except (NotATrace, OSError) as error:
                self.left_out[self.run.trace.name] = reason_of(error)

    def _forget_spans(self) -> None:
        self._spans_file.restart()
        self._cut.pop(self.run.spans.name, None)
        self.spans.clear()

    def _take_spans(self, block: Block) -> None:
        if block.begins_region:
            self.spans.begin_region()
        placed = []
        offset = block.offset
        for line in block.lines:
            try:
                placed.append(Placed(decode_line(line, self._span), offset, len(line)))
            except (ValueError, RecursionError):
                self._cut[self.run.spans.name] += 1
            offset += len(line)
        self.spans.add(placed)

    # ---- small files ------------------------------------------------------------------------------------------------

    def _small_files(self) -> None:
        if self._has_changed(self.run.config_yaml):
            self.left_out.pop(self.run.config_yaml.name, None)
            self.config = run_config(self.run, self.left_out)
        if self._has_changed(self.run.faults):
            self.faults = self._records(self.run.faults, Fault)
        if self._has_changed(self.run.attempts):
            self.attempts = self._records(self.run.attempts, Attempt)
        if (resumption := self.run.resumption()) != self._resumption:
            self._resumption = resumption
            self._stats.pop(self.run.summary, None)
            self._restart(self._metrics_file, self._forget_metrics)
            self._restart(self._ledger_file, self.ended.clear)
        if self._has_changed(path := self.run.summary):
            self.summary = None
            self.left_out.pop(path.name, None)
            try:
                self.summary = read_summary(path) if resumption is None else None
            except FileNotFoundError:
                pass
            except (OSError, ValueError, RecursionError) as error:
                self.left_out[path.name] = f"cannot be read: {reason_of(error)}"
        if self._has_changed(self.run.samples):
            self.left_out.pop(self.run.samples.name, None)
            self.samples = _grids(names_in(self.run.samples, self.run.path, self.left_out))

    def _records(self, path: Path, kind: type[T]) -> list[T]:
        self.left_out.pop(path.name, None)
        records, why = read_foreign(path, kind, self.run.path)
        if why:
            self.left_out[path.name] = why
        return records

    def _has_changed(self, path: Path) -> bool:
        """Return whether a file or folder has changed since the previous call for it."""
        try:
            found = path.stat()
            now: Any = (found.st_ino, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            now = None
        except OSError as error:  # such as a circle of links
            now = error.errno
        changed = self._stats.get(path) != now
        if changed:
            self._stats[path] = now
            self.changes += 1
        return changed

    # ---- details of one group ---------------------------------------------------------------------------------------

    def ledger_line(self, group: int) -> LedgerEntry | None:
        """Read a group's line; None if the group has not ended."""
        place = self.ended.find(group)
        if place is None:
            return None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            entry = decode_line(_read_at(self.run.ledger, *place), self._entry)
            if entry.group == group:
                return entry
        return None  # the file was rewritten since

    def spans_of(self, group: int, prompt: int | None) -> list[tuple[Span, int]]:
        """Read the spans of a group with all their arguments, each with its lane, in the order they began."""
        found = []
        later = None if prompt is None else self.ended.next_of(prompt, group)
        for place in self.spans.of_group(group, prompt, later):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                found.append((self._read_span(place), place.lane))
        return found

    def _read_span(self, place: Where) -> Span:
        content = _read_at(self._spans_source, place.offset, place.size)
        if self._spans_source == self.run.spans:
            return msgspec.json.decode(content, type=Span)
        event = msgspec.json.decode(content, type=TraceEvent)
        end = place.start + event.dur / 1e6
        return Span(place.actor, event.name, place.start, end, event.args)


def _read_at(path: Path, offset: int, size: int) -> bytes:
    with open_file(path, within=path.parent) as file:
        file.seek(offset)
        return file.read(size)


def _grids(names: Iterable[str]) -> list[tuple[str, int]]:
    """List the sample tables among files: ("train" or "validation", update), by update."""
    matches = filter(None, map(_SAMPLE_FILE.fullmatch, names))
    return sorted(((one[1], int(one[2])) for one in matches), key=lambda grid: (grid[1], grid[0]))
