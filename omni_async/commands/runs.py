"""Implements `omni-async runs`: a line per run of a folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from omni_async.commands.command_line import add_command, print_line
from omni_async.commands.emulated import emulated_run
from omni_async.config import ConfigError
from omni_async.config.redact import one_line
from omni_async.records.read.record import reason_of
from omni_async.records.read.run_list import ListedRun, list_runs
from omni_async.records.write.console import columns, duration

_RUNS = """\
List the runs in a folder, the newest first: how each is or ended, its last update, the reward of that update and of
the last validation round, and how long ago it began:

  omni-async runs
  omni-async runs runs/ --json
"""


def add_runs(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    group = "look at a run, and steer it"
    parser = add_command(commands, "runs", "list runs and how they are", _RUNS, f"{__name__}:runs", group)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="of runs (default: runs/)")
    parser.add_argument("--json", action="store_true", help="for a program")


def runs(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, if the folder cannot be read or has no run."""
    try:
        found = list_runs(options.folder)
    except FileNotFoundError:
        found = []
    except OSError as error:
        raise ConfigError(f"{options.folder}: cannot be read: {reason_of(error)}") from None
    if not found:
        raise ConfigError(f"there is no run in {options.folder.absolute()}; name a folder of runs")
    if options.json:
        return print_line(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    now = time.time()
    head = ["run", "status", "update", "reward", "validation", "began"]
    return print_line("\n".join(columns([head, *(_row(one, now) for one in found)])))


def _row(one: ListedRun, now: float) -> list[str]:
    numbers = ["" if value is None else f"{value:.3f}" for value in (one.reward, one.validation)]
    status = f"{one.status}, emulated" if emulated_run(Path(one.path)) else one.status
    return [one_line(one.run, 200), status, str(one.update), *numbers, f"{duration(now - one.began)} ago"]
