"""Runs each section of the probe in a new process.

A device fault, an out-of-memory kill or a hang ends only one section, and no section inherits another's memory.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.arguments import write_json

_STARTED = "started"
_START_S = 120.0  # for a process and its imports; no section's limit counts it
_GRACE_S = 10.0  # for a process that has been killed

Report = Callable[[dict[str, Any]], None]
Status = Literal["done", "failed", "out of memory", "stopped"]

TABLE = "| section | reading |"  # the first line of `to_markdown`


class Section(msgspec.Struct, frozen=True):
    """A part of the probe: `module:name` of its function (Settings, Report), and its most seconds."""

    function: str
    limit_s: float
    about: str


class Settings(msgspec.Struct, frozen=True):
    """The settings of a section. layers: of the transformer. device: torch's name; None: the accelerator."""

    layers: int
    small: bool = False
    device: str | None = None


class Outcome(msgspec.Struct):
    """A section's status, seconds and readings: a `name` with numbers or texts.

    gib: the most memory of the device during a reading, in GiB; None on a CPU."""

    status: Status = "done"
    seconds: float = 0.0
    gib: float | None = None
    error: str | None = None
    readings: list[dict[str, Any]] = []

    def add(self, reading: dict[str, Any]) -> None:
        self.readings.append(reading)
        if reading.get("gib") is not None:
            self.gib = max(self.gib or 0.0, reading["gib"])


class Results(msgspec.Struct):
    settings: dict[str, Any]
    seconds: float = 0.0
    sections: dict[str, Outcome] = {}


def run(sections: Mapping[str, Section], settings: Settings, results: Results, out: Path | None = None) -> Results:
    """Measure the sections one after the other; print every reading, and write all to `out`, as soon as it is known."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use a device that its parent has used
    began = time.monotonic()

    def line(text: str) -> None:
        results.seconds = time.monotonic() - began
        sys.stdout.write(f"{results.seconds:6.1f} s  {text}\n")
        sys.stdout.flush()
        if out is not None:
            write_json(out, results)

    for name, section in sections.items():
        outcome = results.sections[name] = Outcome()
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_measure, args=(section.function, settings, sending))
        process.start()
        sending.close()
        try:
            _follow(receiving, section, outcome, lambda reading, name=name: line(f"{name}: {shown(reading)}"))  # type: ignore[misc]
        except EOFError:
            process.join(_GRACE_S)
            outcome.status, outcome.error = "failed", f"its process ended with exit code {process.exitcode}"
        finally:
            process.kill()  # it sends no more, and a device may block an orderly end
            process.join(_GRACE_S)
        ended = outcome.status if outcome.error is None else f"{outcome.status}: {outcome.error}"
        line(f"{name}: {ended} ({outcome.seconds:.1f} s)")
    return results


def _follow(receiving: Connection, section: Section, outcome: Outcome, tell: Report) -> None:
    """Receive a section's readings until its last message or its limit. EOFError if its process ended before."""
    if not receiving.poll(_START_S) or receiving.recv() != _STARTED:
        outcome.status, outcome.error = "failed", f"its process did not start within {_START_S:g} s"
        return
    began = time.monotonic()
    try:
        while receiving.poll(max(0.0, began + section.limit_s - time.monotonic())):
            message = receiving.recv()
            if not isinstance(message, dict):
                outcome.status, outcome.error = message
                return
            outcome.add(message)
            tell(message)
        outcome.status, outcome.error = "stopped", f"not done after {section.limit_s:g} s"
    finally:
        outcome.seconds = time.monotonic() - began


def _measure(function: str, settings: Settings, results: Connection) -> None:
    """Run one section in this process; send that it started, its readings, and its status with an error or None."""
    module, _, name = function.partition(":")
    measure = getattr(import_module(module), name)
    results.send(_STARTED)
    status, error = "done", None
    try:
        measure(settings, results.send)
    except Exception as caught:  # noqa: BLE001 - reported, and the next section runs
        traceback.print_exc()
        status = "out of memory" if type(caught).__name__ == "OutOfMemoryError" else "failed"
        error = f"{type(caught).__name__}: {first_line(caught)}"
    results.send((status, error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 160 characters of it."""
    return next(iter(str(error).splitlines()), "")[:160]


def shown(reading: Mapping[str, Any]) -> str:
    """Format a reading as one line."""
    values = {key: value for key, value in reading.items() if key != "name" and value is not None}
    return f"{reading['name']}: " + ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def to_markdown(results: Results) -> str:
    """Format all readings as a table."""
    lines = [TABLE, "|---|---|"]
    for name, outcome in results.sections.items():
        lines += [f"| {name} | {shown(reading)} |" for reading in outcome.readings]
        if outcome.error is not None:
            lines.append(f"| {name} | **{outcome.status}**: {outcome.error} |")
    return "\n".join(lines) + "\n"
