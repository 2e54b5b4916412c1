"""Tests what a pipe and a terminal are shown, and numbers in words."""

from __future__ import annotations

import contextlib
import io
import os

import pytest

from omni_async.control.rounds import Change
from omni_async.records.write.console import (
    LineConsole,
    UpdateView,
    counts_left_out,
    duration,
    groups_left_out,
    staleness,
    validated,
    validation_lines,
)
from omni_async.records.write.live_console import LiveConsole, for_stream
from omni_async.records.write.summary import ValidationPoint

VIEW: UpdateView = {
    "update": 12,
    "reward": 0.4312,
    "staleness": 1.24,
    "staleness_counts": {0: 1, 2: 3},
    "images_per_s": 21.34,
    "buffers": {"groups": (3, 16)},
    "busy": {"rollout": 0.97, "trainer": 0.5},
    "extra": {"loss": -0.00123},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_sees_one_flushed_line_per_update() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        console = for_stream(stream, 120)
        assert isinstance(console, LineConsole)
        console.phase("starting ray")
        assert os.read(read, 10_000).decode() == "starting ray\n"
        console.update(VIEW)
        line = "update 12/120 reward 0.431 loss -0.00123 staleness 1.2 busy rollout 97% trainer 50% images/s 21.3\n"
        assert os.read(read, 10_000).decode() == line
        console.update({**VIEW, "rate_unit": "answers/s"})
        assert os.read(read, 10_000).decode() == line.replace("images/s", "answers/s")
        console.validation(ValidationPoint(12, 0.52, {"ocr_exact": 0.5}))
        console.update({"update": 13})
        console.note("two\nlines")
        lines = ["validation of version 12: reward 0.520, ocr_exact 0.500", "update 13/120 validation reward 0.520"]
        assert os.read(read, 10_000).decode().splitlines() == [*lines, "two lines"]
        console.close()
        console.note("after the end")
    assert os.read(read, 10) == b""
    os.close(read)


def test_groups_that_were_not_trained_are_counted_with_their_reasons() -> None:
    """A pipe sees them when they change, a terminal always."""
    counts = {"admitted": 9, "trained": 4, "rejected": 3, "dropped": 0, "live": 2}
    left_out = counts_left_out(counts, {"zero reward variance": 2, "timed out": 1}, {})
    assert left_out == {"rejected": "3: zero reward variance (2), timed out (1)"}
    stream = io.StringIO()
    console = LineConsole(stream, 9)
    console.update({"update": 1})
    console.update({"update": 2, "left_out": left_out})
    console.update({"update": 3, "left_out": left_out})
    console.update({"update": 4, "left_out": left_out | {"dropped": "1: generation failed: 3608 tokens"}})
    assert stream.getvalue().splitlines() == [
        "update 1/9",
        "update 2/9 rejected 3: zero reward variance (2), timed out (1)",
        "update 3/9",
        "update 4/9 dropped 1: generation failed: 3608 tokens",
    ]
    terminal = Terminal()
    live = LiveConsole(terminal, 9)
    for update in (2, 3):
        live.update({"update": update, "left_out": left_out})
    live.close()
    assert terminal.getvalue().count("zero reward variance (2)") >= 2


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    for update in (1, 2):
        for_stream(stream, 2).update({"update": update})
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_terminal_gets_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a batch system's is "dumb", on which rich replaces nothing in place
    terminal = Terminal()
    console = for_stream(terminal, 120, 60)
    assert isinstance(console, LiveConsole)
    console.phase("starting ray")
    console._live.refresh()
    assert "60/120" in terminal.getvalue(), "it begins at the updates made before"
    console.update(VIEW)
    console.validation(ValidationPoint(12, 0.52, {"ocr_exact": 0.5}))
    console.update({**VIEW, "update": 73})
    console.note("[not markup]")
    console.close()
    console.close()
    shown = terminal.getvalue()
    ages = "1.2 updates on average: 1 group is 0 updates old, 3 are 2"
    numbers = ("73/120", "0.431", "3/16", ages, "97%", "21.3", "validation of version 12: reward 0.520")
    assert [text for text in ("starting ray", *numbers, "[not markup]") if text not in shown] == []


def test_the_time_left_is_that_at_this_attempts_pace() -> None:
    """Checks the pace: the updates of earlier attempts took no time of this one."""
    console = LiveConsole(Terminal(), 120, 60)
    now = [0.0]
    console._progress.get_time = lambda: now[0]
    for update in (61, 62, 63):
        now[0] += 10.0
        console.update({"update": update})
    assert console._progress.tasks[0].time_remaining == 10 * (120 - 63)
    console.close()


def test_the_last_words_have_the_numbers_of_the_rounds() -> None:
    first = ValidationPoint(0, 0.253, {"ocr_exact": 0.278, "old": 1.0})
    last = ValidationPoint(100, 0.9, {"ocr_exact": 0.956})
    both = "validation of versions 0 to 100 (3 rounds): reward 0.253 -> 0.900, ocr_exact 0.278 -> 0.956"
    assert validation_lines([first, ValidationPoint(50, 0.5, {}), last], None) == [both]
    only = "validation of version 100: reward 0.900, ocr_exact 0.956"
    assert validation_lines([last], None) == [validated(last)] == [only]

    first = ValidationPoint(0, 0.5, {}, 2, 2)
    last = ValidationPoint(4, 1.0, {}, 1, 2, {"no face found": 1})
    left_out = "1 of 2 samples not scored: no face found; it cannot be the best"
    assert validated(last) == f"validation of version 4: reward 1.000; {left_out}"
    title = "validation of versions 0 to 4 (2 rounds)"
    assert validation_lines([first, last], Change(0, 4, {"reward": (1.0, 1.0)}, 1, 2)) == [
        f"{title}: reward 1.000 -> 1.000 over the 1 of 2 samples that both have scored",
        f"  version 4: {left_out}",
    ]
    title, *each = validation_lines([first, last], None)
    assert "not comparable" in title and each == [validated(first), validated(last)]
    empty = ValidationPoint(9, None, {}, 0, 2, {"no face found": 2})
    assert "no reward; 2 of 2 samples not scored" in validated(empty)


def test_groups_that_were_not_trained_are_counted_by_how_they_ended() -> None:
    counts = {"admitted": 5, "trained": 3, "rejected": 0, "dropped": 2, "live": 0}
    dropped = {"generation failed 3 times: 3608 tokens": 1, "generation failed 2 times: 3608 tokens": 1}
    lines = ["2 of 5 groups were dropped: generation failed: 3608 tokens"]
    assert groups_left_out(counts, {}, dropped) == lines
    assert groups_left_out(counts, dropped, None) == lines, "recorded before: all reasons together"
    both, equal = counts | {"trained": 2, "rejected": 1}, {"zero reward variance": 1}
    assert groups_left_out(both, equal, dropped) == ["1 of 5 groups was rejected: zero reward variance", *lines]
    unknown = groups_left_out(both, equal | dropped, None)
    assert unknown[:2] == ["1 of 5 groups was rejected", "2 of 5 groups were dropped"] and "because" in unknown[2]
    once_more = groups_left_out(both, equal | {"x": 4}, equal)  # recorded before, then resumed
    assert once_more[-1].endswith("x (4), zero reward variance (2)")
    assert groups_left_out(counts | {"dropped": 0}, {}, {}) == []


def test_ages_and_seconds_in_words() -> None:
    assert staleness(0.0, {0: 4}) == "0.0 updates on average: 4 groups are 0 updates old"
    assert staleness(1.25, {1: 3, 2: 1}) == "1.2 updates on average: 3 groups are 1 update old, 1 is 2"
    assert staleness(0.5, {}) == "0.5 updates on average"
    seconds = (0.4, 59.6, 200, 7500, 3600, 3.2 * 86400, -1)
    assert [duration(one) for one in seconds] == ["0 s", "1 min", "3 min 20 s", "2 h 5 min", "1 h", "3 d 4 h", "0 s"]


EVIL = "\x1b]0;owned\x07\x1b[2J"


def test_a_terminal_obeys_nothing_that_a_reward_server_named_or_raised() -> None:
    terminal = Terminal()
    console = for_stream(terminal, 120)
    console.phase(EVIL)
    console.note(EVIL)
    console.update({**VIEW, "extra": {EVIL: 1.0}, "busy": {EVIL: 0.5}, "buffers": {EVIL: (1, 2)}})
    console.validation(ValidationPoint(12, 0.52, {EVIL: 0.5}))
    console.close([f"failed {EVIL}", f"  images    {EVIL}\r\x0b"])
    shown = terminal.getvalue()
    assert "\x1b]0" not in shown and "\x1b[2J" not in shown and "\x07" not in shown
    assert shown.count(r"\x1b]0;owned\x07\x1b[2J") >= 8
    assert f"  images    {EVIL!r}".replace("'", "") in shown, "last words keep their indentation"
