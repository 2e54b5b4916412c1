from __future__ import annotations

import contextlib
import io
import os

from omni_async.tracking.console import LineConsole, UpdateView, for_stream
from omni_async.tracking.live_console import LiveConsole

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
        console.validation(12, 0.52, {"ocr_exact": 0.5})
        console.update({"update": 13})
        console.note("two\nlines")
        assert os.read(read, 10_000).decode() == ("validation of version 12: 0.520 ocr_exact 0.500\nupdate 13/120 val 0.520\ntwo lines\n")
        console.close()
        console.note("after the end")
    assert os.read(read, 10) == b""
    os.close(read)


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    console = for_stream(stream, 2)
    console.update({"update": 1})
    console.update({"update": 2})
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_terminal_gets_a_live_display() -> None:
    terminal = Terminal()
    console = for_stream(terminal, 120)
    assert isinstance(console, LiveConsole)
    console.phase("starting ray")
    console.update(VIEW)
    console.validation(12, 0.52, {"ocr_exact": 0.5})
    console.update({**VIEW, "update": 13})
    console.note("[not markup]")
    console.close()
    console.close()
    shown = terminal.getvalue()
    for text in ("starting ray", "13/120", "0.431", "0: 1  2: 3", "3/16", "97%", "21.3", "validation of version 12: 0.520", "[not markup]"):
        assert text in shown


EVIL = "\x1b]0;owned\x07\x1b[2J"


def test_a_terminal_obeys_nothing_that_was_said_elsewhere() -> None:
    """A reward server names the parts of its score, and its exceptions are a run's last words."""
    terminal = Terminal()
    console = for_stream(terminal, 120)
    console.phase(EVIL)
    console.note(EVIL)
    console.update({**VIEW, "extra": {EVIL: 1.0}, "busy": {EVIL: 0.5}, "buffers": {EVIL: (1, 2)}})
    console.validation(12, 0.52, {EVIL: 0.5})
    console.close([f"failed {EVIL}", f"  images    {EVIL}\r\x0b"])
    shown = terminal.getvalue()
    assert "\x1b]0" not in shown and "\x1b[2J" not in shown and "\x07" not in shown
    assert shown.count(r"\x1b]0;owned\x07\x1b[2J") >= 8
    assert f"  images    {EVIL!r}".replace("'", "") in shown, "last words keep their indentation"
