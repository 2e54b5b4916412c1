"""Tests the timeline of a report: its data are bounded and say so, and a group can be followed in the file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.commands.report import lanes as report_lanes
from omni_async.commands.report.data import page_of
from omni_async.commands.report.file import one_file
from omni_async.commands.report.lanes import Timeline, embedded, lanes
from omni_async.records.read.record import read_run
from omni_async.records.write.files import read_records
from omni_async.types import Span
from tests.support.browser import OpenPage, browser, open_page
from tests.support.made_run import MadeRun

__all__ = ["browser", "open_page"]


def test_the_newest_spans_are_embedded_and_the_page_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun(groups=100).write(tmp_path)
    spans = read_records(run.spans, Span)
    whole = embedded(Timeline(read_run(tmp_path).spans()), ())
    assert len(whole["boxes"]["start"]) == len(spans) and whole["note"].startswith(f"All {len(spans)} spans")
    monkeypatch.setattr(report_lanes, "MOST_SPANS", 50)
    part = embedded(Timeline(read_run(tmp_path).spans()), ())
    assert {len(column) for column in part["boxes"].values()} == {50}
    newest = sorted(span.end for span in spans)[-50:]
    origin = min(span.start for span in spans)
    assert sorted(part["boxes"]["end"]) == pytest.approx([end - origin for end in newest], abs=1e-5)
    assert f"The newest 50 of {len(spans)} spans" in part["note"] and 0 < part["start"] < part["end"]


def test_groups_of_the_spans_have_their_ledger_lines_and_prompts(tmp_path: Path) -> None:
    MadeRun(groups=20).write(tmp_path)
    run = read_run(tmp_path)
    data = lanes(run, Timeline(run.spans())).data
    assert [*map(int, data["groups"])] == list(range(20))
    assert data["groups"]["7"]["prompt"] == "prompt 7" and data["groups"]["7"]["entry"]["trained_version"] == 1
    assert data["lanes"] == ["rollout-0", "rollout-1", "reward-0", "trainer", "publisher"]


@pytest.mark.slow
def test_a_group_is_followed_in_a_report_that_has_no_server(tmp_path: Path, open_page: OpenPage) -> None:
    MadeRun(groups=60).write(tmp_path)
    page_file = tmp_path / "report.html"
    page_file.write_text(one_file(page_of([read_run(tmp_path)], "now")))
    page = open_page(page_file.as_uri())
    page.locator("canvas.lanes").scroll_into_view_if_needed()
    page.get_by_role("textbox", name="Group number").fill("42")
    page.get_by_role("button", name="Follow group").click()
    page.get_by_role("heading", name="Group 42").wait_for()
    told = page.locator(".way").inner_text()
    assert "6 steps by version 3, 4 by 4" in told and "Trained in update 5" in told and "1 call of scorers" in told
    page.get_by_role("textbox", name="Group number").fill("60")
    page.get_by_role("button", name="Follow group").click()
    page.get_by_text("There is no group 60 here.").wait_for()
