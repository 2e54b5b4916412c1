"""Implements `omni-async logs`: what the console and the workers of a run printed."""

from __future__ import annotations

import argparse
import time
from typing import Any

from omni_async.commands.command_line import add_command, positive, print_line, run_folder
from omni_async.config import ConfigError
from omni_async.records.read.logs import logs_of, read_log
from omni_async.records.read.record import reason_of
from omni_async.records.write.rundir import RunDirectory

_LOGS = """\
Show what the console and the workers of a run printed, prints of scorers and tracebacks of libraries included. Without
WORKER, the last lines of all; with a worker or a role, its alone. -f waits for more until the run is over:

  omni-async logs runs/quickstart-20260101-120000
  omni-async logs runs/quickstart-20260101-120000 reward-0 --lines 500
  omni-async logs runs/quickstart-20260101-120000 reward -f
"""
_LOOK_S = 0.5


def add_logs(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    group = "look at a run, and steer it"
    parser = add_command(commands, "logs", "show what a run's workers printed", _LOGS, f"{__name__}:logs", group)
    parser.add_argument("run", type=run_folder, help="its run folder, or its name in runs/")
    parser.add_argument("worker", nargs="?", help="a worker, such as reward-0, or a role, such as reward")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more lines until the run is over")
    parser.add_argument("--lines", type=positive, default=20, help="the last lines of each log (default: 20)")


def logs(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, if there is no such run or log."""
    run = RunDirectory(options.run)
    if not run.config_yaml.is_file():
        raise ConfigError(f"{options.run} is not a run folder")
    if not logs_of(run, options.worker) and not (options.follow and options.worker is None):
        raise ConfigError(_no_log(run, options.worker))
    ends: dict[str, int] = {}
    while True:
        running = run.is_running()
        for name, path in logs_of(run, options.worker).items():
            try:
                lines, end = read_log(path, run.path, ends.get(name))
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
            for line in lines[0 if name in ends else -options.lines :]:
                print_line(line if options.worker == name else f"{name} | {line}")
            ends[name] = end
        if not options.follow or not running:
            return 0
        time.sleep(_LOOK_S)


def _no_log(run: RunDirectory, worker: str | None) -> str:
    found = ", ".join(logs_of(run))
    if not found:
        return f"{run.path} has no logs; a run of an earlier version wrote none"
    return f"{run.path} has no log of {worker!r}; it has {found}"
