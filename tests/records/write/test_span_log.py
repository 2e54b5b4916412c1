"""Tests the log of a run's spans: all on disk, the recent ones in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.records.write.rundir import RunDirectoryError
from omni_async.records.write.span_log import SpanLog
from omni_async.types import Span


def spans(start: int, count: int) -> list[Span]:
    return [Span("rollout-0", "generate", float(i), i + 0.5, {"group": i}) for i in range(start, start + count)]


def test_all_spans_are_kept_on_disk_and_the_recent_ones_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path, keep_s=10.0).add(spans(0, 3))  # another process's, which begins anew
    log = SpanLog(path, keep_s=10.0)
    assert [*log] == []
    for start in range(0, 1000, 10):
        log.add(spans(start, 10))
    assert [*log] == spans(0, 1000)
    assert log.recent(995.0) == [Span(span.actor, span.kind, span.start, span.end) for span in spans(995, 5)]
    assert len(log._recent) <= 20
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    assert [*log] == [*spans(0, 1), *spans(2, 1)], "a line that was cut off costs no other"
    log.remove_file()
    assert [*log] == [] and not path.exists()


def test_held_spans_stay_in_memory_until_the_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path, keep_s=10.0).add(spans(0, 3))
    before = path.read_bytes()
    log = SpanLog(path, keep_s=10.0, held=True)
    log.add(spans(5, 2))
    log.remove_file()
    assert path.read_bytes() == before
    assert [*log] == spans(5, 2) and len(log.recent(0.0)) == 2
    log.begin_file()
    log.add(spans(7, 1))
    assert [*log] == spans(5, 3) and path.read_bytes().count(b"\n") == 3


def test_a_log_that_gives_room_keeps_its_newest_spans(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", keep_s=10.0)
    log.add(spans(0, 50))
    assert log.newest(2) == spans(48, 2)
    log.give_room(3)
    assert not [*tmp_path.iterdir()] and [*log] == [*log] == spans(47, 3) and len(log) == 3
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*gone/spans\.jsonl: No such file or directory"):
        SpanLog(tmp_path / "gone" / "spans.jsonl", keep_s=10.0).add(spans(0, 1))
