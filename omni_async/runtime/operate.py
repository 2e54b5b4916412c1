"""`omni-async status`, `scale` and `stop`: commands for a run that is under way."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from omni_async.config import ConfigError

_STATUS = """\
Say how a running job is: its parts with their processes, the versions its engines hold, its buffers, and what became of its groups:

  omni-async status runs/quickstart-20260101-120000
  omni-async status runs/quickstart-20260101-120000 --json
"""

_SCALE = """\
Change how many engines or reward workers a running job has. New engines get work once they hold the current weights; those that leave finish what they
have. Training goes on meanwhile:

  omni-async scale runs/quickstart-20260101-120000 rollout=3
  omni-async scale runs/quickstart-20260101-120000 rollout=1 reward=2
"""


_STOP = """\
End a running job as Ctrl-C would: it leaves a checkpoint, and the same recipe with checkpoint.resume=auto goes on with it:

  omni-async stop runs/quickstart-20260101-120000
"""


def add_operations(commands: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    status = commands.add_parser("status", help="say how a running job is", description=_STATUS, formatter_class=raw)
    status.add_argument("run", type=Path, help="its run folder")
    status.add_argument("--json", action="store_true", help="for a program")
    scale = commands.add_parser("scale", help="change a running job's engines or reward workers", description=_SCALE, formatter_class=raw)
    scale.add_argument("run", type=Path, help="its run folder")
    stop = commands.add_parser("stop", help="end a running job, with a checkpoint", description=_STOP, formatter_class=raw)
    stop.add_argument("run", type=Path, help="its run folder")
    scale.add_argument("workers", nargs="+", metavar="ROLE=N", help="rollout=N or reward=N, at least 1")


def operate(options: argparse.Namespace) -> int:
    from omni_async.runtime.control_socket import ControlError, Request, ask

    if not (options.run / "config.yaml").is_file():
        raise ConfigError(f"{options.run} is not a run folder")
    request = Request(scale=_workers(options.workers) if options.command == "scale" else {}, stop=options.command == "stop")
    try:
        status = ask(options.run / "control.sock", request)
    except ControlError as error:
        raise ConfigError(str(error)) from None
    if request.stop:
        sys.stdout.write("it stops when it has written a checkpoint\n")
        return 0
    lines = [json.dumps(status, indent=2)] if getattr(options, "json", False) else _lines(status)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _workers(words: list[str]) -> dict[str, int]:
    workers = {}
    for word in words:
        role, equals, number = word.partition("=")
        if role not in ("rollout", "reward") or not equals or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"scale: {word!r}: expected rollout=N or reward=N with N at least 1")
        workers[role] = int(number)
    return workers


def _lines(status: dict[str, Any]) -> list[str]:
    lines = [f"{'part':<14} {'pid':>8}  weights"]
    for name, where in status["parts"].items():
        held = status["engines"].get(name)
        lines.append(f"{name:<14} {where['pid']:>8}  {'' if held is None else 'none yet' if held < 0 else f'version {held}'}".rstrip())
    counts = status["conservation"]
    lines.append("groups: " + ", ".join(f"{counts[name]} {name}" for name in ("admitted", "trained", "rejected", "dropped", "live")))
    for name, buffer in status["buffers"].items():
        if "reserved" in buffer:
            lines.append(f"{name}: {buffer['reserved']} of {buffer['capacity']} places taken, {buffer['ready']} ready")
    lines.append(f"faults mended: {status['faults']}")
    return lines
