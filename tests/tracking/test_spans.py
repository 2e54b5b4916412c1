"""Tests the log of spans: all on disk, the recent ones in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.tracking.rundir import RunDirectoryError, SpanLog
from omni_async.types import Span


def spans(start: int, count: int) -> list[Span]:
    return [Span("rollout-0", "generate", float(i), i + 0.5, {"group": i}) for i in range(start, start + count)]


def test_all_spans_are_kept_on_disk_and_the_recent_ones_in_memory(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", keep_s=10.0)
    for start in range(0, 1000, 10):
        log.add(spans(start, 10))
    assert log.all() == spans(0, 1000)
    assert log.recent(995.0) == [Span(span.actor, span.kind, span.start, span.end) for span in spans(995, 5)]
    assert len(log._recent) <= 20
    log.close()
    assert log.all() == [] and not (tmp_path / "spans.jsonl").exists()


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    log = SpanLog(path, keep_s=10.0)
    log.add(spans(0, 3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    assert log.all() == [spans(0, 3)[0], spans(0, 3)[2]]


def test_held_spans_stay_in_memory_until_the_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path, keep_s=10.0).add(spans(0, 3))
    before = path.read_bytes()
    log = SpanLog(path, keep_s=10.0, held=True)
    log.add(spans(5, 2))
    log.close()
    assert path.read_bytes() == before
    assert log.all() == spans(5, 2) and len(log.recent(0.0)) == 2
    log.open()
    log.add(spans(7, 1))
    assert log.all() == spans(5, 3) and path.read_bytes().count(b"\n") == 3


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*gone/spans\.jsonl: No such file or directory"):
        SpanLog(tmp_path / "gone" / "spans.jsonl", keep_s=10.0).add(spans(0, 1))


def test_another_process_begins_anew(tmp_path: Path) -> None:
    SpanLog(tmp_path / "spans.jsonl", keep_s=10.0).add(spans(0, 3))
    assert SpanLog(tmp_path / "spans.jsonl", keep_s=10.0).all() == []
