"""Implements `omni-async serve-reward`: its arguments, its help, and its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from omni_async.accelerator import showing
from omni_async.commands.command_line import add_command, print_error

_SERVE = """\
Serve scorers over HTTP, for the scorer `http` of runs on other machines or in other environments. The file has the
section `reward` of a recipe and a section `server` (docs/rewards/http.md has both, and the protocol). By default it
listens on this machine only; another server.host needs a token:

  omni-async serve-reward scorers.yaml
  omni-async serve-reward scorers.yaml server.port=8701 reward.batch=32
  omni-async serve-reward scorers.yaml server.host=0.0.0.0 server.token=env:REWARD_TOKEN
"""


def add_serve_reward(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "serve-reward",
        "serve scorers over HTTP",
        _SERVE,
        f"{__name__}:serve_reward",
        "extend",
    )
    parser.add_argument("scorers", type=Path, metavar="SCORERS", help="a YAML file with the scorers and the server")
    more = "override a value of the file (values are YAML)"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=more)


def serve_reward(options: argparse.Namespace) -> int:
    """Serve until a signal ends it, and return the exit code. ConfigError, one line, if it cannot start."""
    from omni_async.rewards.server.serve import serve
    from omni_async.rewards.server.settings import load_server

    with contextlib.redirect_stdout(sys.stderr):  # only the address may go to stdout, not a scorer module's output
        config = load_server(options.scorers, options.overrides)
        if config.placement.reward.gpus == 0:  # a scorer that searches for a device would take another process's
            os.environ.update(showing({}))
        return asyncio.run(serve(config, _say, print_error))


def _say(text: str) -> None:
    """Write a line for the program that started the server: bypasses the redirection, which is for scorers."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(f"{text}\n")
    sys.__stdout__.flush()
