"""Shows a run to a person or a pipe.

A pipe gets exactly one flushed line per update; a terminal gets a live display.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from omni_async.config.redact import one_line
from omni_async.tracking.words import UpdateView, indented, validated


class Console(Protocol):
    def phase(self, text: str) -> None:
        """Show the phase before the first update: `starting ray`, `loading engine`."""

    def update(self, view: UpdateView) -> None:
        """Show a finished update."""

    def validation(self, version: int, value: float, parts: dict[str, float]) -> None:
        """Show a finished validation round."""

    def note(self, text: str) -> None:
        """Show a notice on a line of its own."""

    def close(self, last_words: Sequence[str] = ()) -> None:
        """End the display and leave these lines below it, unwrapped.

        Nothing more is shown; a second call changes nothing."""


def for_stream(stream: TextIO, total_updates: int, done: int = 0) -> Console:
    """Return the console that suits the stream. `done`: updates that earlier attempts of the run have made."""
    if stream.isatty():
        from omni_async.tracking.live_console import LiveConsole

        return LiveConsole(stream, total_updates, done)
    return LineConsole(stream, total_updates)


class LineConsole:
    """Lines for pipes and log files: `update 12/120 reward 0.431 staleness 1.2 images/s 21.3 validation reward 0.520`.

    When the reader goes away (`| head`), output stops; the run goes on."""

    def __init__(self, stream: TextIO, total_updates: int) -> None:
        self._stream = stream
        self._total = total_updates
        self._validation: float | None = None
        self._closed = False

    def phase(self, text: str) -> None:
        self._line(text)

    def update(self, view: UpdateView) -> None:
        words = [f"update {view.get('update', '?')}/{self._total}"]
        if "reward" in view:
            words.append(f"reward {view['reward']:.3f}")
        words += [f"{name} {value:.4g}" for name, value in view.get("extra", {}).items()]
        if "staleness" in view:
            words.append(f"staleness {view['staleness']:.1f}")
        if view.get("busy"):
            words.append("busy " + " ".join(f"{role} {fraction:.0%}" for role, fraction in view["busy"].items()))
        if "images_per_s" in view:
            words.append(f"images/s {view['images_per_s']:.1f}")
        if self._validation is not None:
            words.append(f"validation reward {self._validation:.3f}")
        self._line(" ".join(words))

    def validation(self, version: int, value: float, parts: dict[str, float]) -> None:
        self._validation = value
        self._line(validated(version, value, parts))

    def note(self, text: str) -> None:
        self._line(text)

    def close(self, last_words: Sequence[str] = ()) -> None:
        for line in last_words:
            self._write(indented(line))
        self._closed = True

    def _line(self, text: str) -> None:
        self._write(one_line(" ".join(text.split())))

    def _write(self, line: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream is closed
            self._closed = True
