"""Makes the report's sections of a run for its live page, without the parts that its section `now` shows.

The section that needs all spans takes far longer than the others, so it is made less often. The predicted gains are
simulated once for a profile, which takes seconds; the other sections do not wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from omni_async.commands.report.blocks import Chart, Lanes, Section, Tab, Text
from omni_async.commands.report.data import SECTIONS, is_last
from omni_async.commands.report.file import as_json
from omni_async.commands.report.pictures import samples
from omni_async.commands.report.shown import Shown, show
from omni_async.commands.report.what_it_buys import TITLE
from omni_async.records.read.record import Run, read_run
from omni_async.records.write.rundir import RunDirectory

# The ratio of a pause to the processor time of the work before it.
FRUGAL = 300.0
_OF_SPANS, _SIMULATED = "waiting", "what-it-buys"
LIVE_CHARTS = ("reward", "accuracy")  # ids of charts that are up to date in `now`
# Reading more spans than this takes seconds; the lanes show them in windows.
_MOST_SPAN_BYTES = 20_000_000


_SIMULATING = Section(_SIMULATED, TITLE, blocks=[Text("It is being simulated.", "nothing")], folded=True)


class Made(NamedTuple):
    """The JSON of the sections, the processor time of the regular sections, and whether all are present."""

    content: bytes
    took_s: float
    is_whole: bool


class Sections:
    """The sections of one run's report, made in a thread, one call at a time."""

    def __init__(self) -> None:
        self._waiting: Section | None = None
        self._waiting_after = 0.0
        self._is_begun = False

    def make(self, folder: RunDirectory) -> Made:
        """Make the current sections. Raises the errors of reading a run."""
        began = time.thread_time()
        shown = show([read_run(folder.path)])
        took = time.thread_time() - began
        is_whole, self._is_begun = self._is_begun, True
        apart = {
            _OF_SPANS: self._of_spans(shown, folder),
            _SIMULATED: SECTIONS[_SIMULATED](shown) if is_whole else _SIMULATING,
        }
        began = time.thread_time()
        sections = _sections()
        made = {name: apart[name] if name in apart else sections[name](shown) for name in sorted(sections, key=is_last)}
        content = as_json([_without_live_parts(one) for name in sections if (one := made[name]) is not None])
        return Made(content, took + time.thread_time() - began, is_whole)

    def _of_spans(self, shown: Sequence[Shown], folder: RunDirectory) -> Section | None:
        """Return the section that needs all spans, or an older version until it is due; None with too many spans."""
        if not _has_few_spans(folder):
            return None
        if self._waiting is None or time.monotonic() >= self._waiting_after or shown[0].run.status != "running":
            began = time.thread_time()
            self._waiting = SECTIONS[_OF_SPANS](shown)
            self._waiting_after = time.monotonic() + FRUGAL * (time.thread_time() - began)
        return self._waiting


def _sections() -> dict[str, Callable[[Sequence[Shown]], Section]]:
    kept = {name: make for name, make in SECTIONS.items() if name != "alerts"}
    return {**kept, "samples": lambda shown: samples(shown, _address)}


def _address(run: Run) -> Callable[[Path], str]:
    return lambda path: f"samples/{path.name}"


def _has_few_spans(folder: RunDirectory) -> bool:
    sizes = (path.stat().st_size for path in (folder.spans, folder.trace) if path.is_file())
    return max(sizes, default=0) <= _MOST_SPAN_BYTES


def _without_live_parts(section: Section) -> Section:
    def kept(tab: Tab) -> Tab:
        return msgspec.structs.replace(tab, blocks=[block for block in tab.blocks if not isinstance(block, Lanes)])

    blocks = [block for block in section.blocks if not (isinstance(block, Chart) and block.id in LIVE_CHARTS)]
    if section.blocks and not blocks:
        blocks = [Text("There is no validation round yet.", "nothing")]
    return msgspec.structs.replace(section, blocks=blocks, tabs=[kept(tab) for tab in section.tabs])
