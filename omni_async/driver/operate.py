"""Implements `omni-async status`, `scale` and `stop`: commands for a run that is under way."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omni_async.config import ConfigError
from omni_async.config.redact import one_line

_STATUS = """\
Say how a job is. Of a running one: its update and the time left, reward, staleness and the last validation round,
what became of its groups, its parts with their processes and the versions its engines hold, and its buffers. Of one
that is over or was cut off: what it left behind.

  omni-async status runs/quickstart-20260101-120000
  omni-async status runs/quickstart-20260101-120000 --json
"""

_SCALE = """\
Change how many engines, reward workers or workers of an installed role a running job has. New engines get work once
they hold the newest weights, and the command waits for that and says so; those that leave finish what they have.
Training goes on meanwhile:

  omni-async scale runs/quickstart-20260101-120000 rollout=3
  omni-async scale runs/quickstart-20260101-120000 rollout=1 reward=2
"""


_STOP = """\
End a running job as Ctrl-C would: it leaves a checkpoint, and the same recipe with checkpoint.resume=auto goes on
with it:

  omni-async stop runs/quickstart-20260101-120000
"""


def add_command(commands: Any, name: str, purpose: str, description: str) -> argparse.ArgumentParser:
    """Add a command, and return the parser of its arguments. `purpose`: its line in the list of commands."""
    raw = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=description, formatter_class=raw
    )
    return parser


def add_operations(commands: Any) -> None:
    status = add_command(commands, "status", "say how a job is, or how it ended", _STATUS)
    scale = add_command(commands, "scale", "change a running job's engines or reward workers", _SCALE)
    stop = add_command(commands, "stop", "end a running job, with a checkpoint", _STOP)
    for parser in (status, scale, stop):
        parser.add_argument("run", type=Path, help="its run folder")
    status.add_argument("--json", action="store_true", help="for a program")
    scale.add_argument("workers", nargs="+", metavar="ROLE=N", help="rollout=N or reward=N, at least 1")


def operate(options: argparse.Namespace) -> int:
    from omni_async.driver.control_socket import ControlError, NotRunning, Request, ask
    from omni_async.driver.status import running_lines

    if not (options.run / "config.yaml").is_file():
        raise ConfigError(f"{options.run} is not a run folder")
    request = Request(
        scale=_workers(options.workers) if options.command == "scale" else {}, stop=options.command == "stop"
    )
    try:
        status = ask(options.run / "control.sock", request, tell=lambda text: _write([one_line(text)]))
    except NotRunning as error:
        if options.command != "status":
            raise ConfigError(str(error)) from None
        return _say_what_is_left(options.run, options.json)
    except ControlError as error:
        raise ConfigError(str(error)) from None
    if request.stop:
        return _say(["it stops when it has written a checkpoint"])
    as_json = getattr(options, "json", False)
    return _say([json.dumps(status, indent=2)] if as_json else map(one_line, running_lines(status)))


def _say_what_is_left(run: Path, as_json: bool) -> int:
    """Print what a run that does not answer has left behind."""
    import msgspec

    from omni_async.driver.status import left_behind, left_behind_lines

    found = left_behind(run)
    if as_json:
        return _say([msgspec.json.format(msgspec.json.encode(found), indent=2).decode()])
    return _say(map(one_line, left_behind_lines(found)))


def _say(lines: Iterable[str]) -> int:
    _write(lines)
    return 0


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()  # so that a line is read before the wait that it announces


def _workers(words: list[str]) -> dict[str, int]:
    from omni_async.driver.control_socket import MOST_WORKERS
    from omni_async.role_table import scalable_roles

    workers: dict[str, int] = {}
    for word in words:
        role, equals, number = word.partition("=")
        # Python refuses to read thousands of digits.
        fits = len(number) < 20 and number.isdecimal() and 1 <= int(number) <= MOST_WORKERS
        if role not in scalable_roles() or not equals or not fits:
            expected = " or ".join(f"{role}=N" for role in scalable_roles())
            raise ConfigError(f"scale: {one_line(word, 100)!r}: expected {expected} with N from 1 to {MOST_WORKERS}")
        if role in workers:
            raise ConfigError(f"scale: {word!r}: {role} is there twice")
        workers[role] = int(number)
    return workers
