"""Implements `omni-async docs`: writes the configuration reference from the schema."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from omni_async.commands.command_line import add_command, print_line, require_writable
from omni_async.config import ConfigError
from omni_async.config.writing import write_atomic

_DOCS = """\
Write the configuration reference, a table of every key with its bounds, default and meaning, from the schema:

  omni-async docs
  omni-async docs --out reference.md
"""


def add_docs(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    purpose = "write the configuration reference from the schema"
    docs = add_command(commands, "docs", purpose, _DOCS, f"{__name__}:docs", "extend")
    page = Path("docs/configuration.md")
    docs.add_argument("--out", type=Path, default=page, help=f"file to write (default: {page})")


def docs(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, if the file cannot be written."""
    from omni_async.config.reference import reference

    out: Path = options.out
    require_writable("--out", out)
    try:
        write_atomic(out, reference().encode(), streams=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error.strerror or error}") from None
    return print_line(f"wrote {out}")
