"""Implements `omni-async watch`: its arguments, its help, and its end."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Any

from omni_async.commands.command_line import add_command, newest_run, print_line, run_folder
from omni_async.config import ConfigError
from omni_async.config.reading import real_path

_WATCH = """\
Show a run's page live in a browser: its progress, its bottleneck and its reward curve first, then the newest samples,
buffers, accelerators and workers, alerts, what every worker does and prints, a group's way from prompt to update, and
all of the report. It also shows a run that is over or died:

  omni-async watch
  omni-async watch runs/quickstart-20260101-120000 --port 8710
  omni-async watch runs/

The last one lists all runs in that folder, with a page for each. The command listens on this machine alone. From
elsewhere, use a tunnel: `ssh -L 8710:localhost:8710 MACHINE` there, and open the link that this command prints. Another
--host needs a token, which browsers are asked for:

  omni-async watch --host 0.0.0.0 --token env:WATCH_TOKEN

Exit codes: 0 ended by a signal, 2 wrong arguments, 130 Ctrl-C.
"""
_PORT = 8710
_RUNS = Path("runs")


def add_watch(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "watch",
        "show a run's page live",
        _WATCH,
        f"{__name__}:watch",
        "look at a run, and steer it",
    )
    parser.add_argument(
        "run", nargs="?", type=run_folder, help="a run folder, or a folder of runs (default: the newest run in runs/)"
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"to listen at; 0: a free one (default: {_PORT})")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--token", metavar="env:NAME", help="the environment variable with the secret of viewers")


def watch(options: argparse.Namespace) -> int:
    """Serve until a signal ends it, and return the exit code. ConfigError, one line, if it cannot start."""
    from omni_async.rewards.server.listener import read_token, require_token

    folder = newest_run(_RUNS) if options.run is None else options.run
    is_one = (folder / "config.yaml").is_file()
    if not is_one and not any(folder.glob("*/config.yaml")):
        raise ConfigError(f"{folder} is not a run folder, which has a config.yaml, and contains none")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port: {options.port}: expected 0 to 65535")
    token = read_token(options.token, "--token")
    require_token(options.host, token, "--host", "--token")
    return asyncio.run(_serve(real_path(folder), options.host, options.port, token, is_one))


async def _serve(folder: Path, host: str, port: int, token: str | None, is_one: bool = True) -> int:
    from omni_async.commands.watch.serve import serving
    from omni_async.rewards.server.listener import end_signal

    # aiohttp logs each non-HTTP request with its traceback, so strangers could fill the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(Once("socket.accept() out of system resource"))
    async with serving(folder, host, port, token, is_one) as (address, key):
        ended = end_signal()
        print_line(
            f"watching {folder.name} at {address}/#{key}" if token is None else f"watching {folder.name} at {address}"
        )
        if token is None:
            print_line("who has this link can stop and scale the run; without what is behind the # they can only look")
        return await ended


class Once(logging.Filter):
    """A filter that lets a message pass once: asyncio logs hundreds while there are too many connections.

    text: the beginning of the message."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(self._text):
            return True
        passed, self._passed = self._passed, True
        return not passed
