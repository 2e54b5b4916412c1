"""Gives benchmarks uniform command lines and output files."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omni_async.config.writing import write_atomic

EMULATED = Path(__file__).parents[1] / "recipes" / "emulated"


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.<name>`; `description` is shown unchanged."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def benchmark_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a `command_parser` with the option `--out`."""
    parser = command_parser(name, description)
    folder = Path("runs/bench") / name
    parser.add_argument("--out", type=Path, default=folder, help=f"folder for results.json (default: {folder})")
    return parser


def add_emulated(parser: argparse.ArgumentParser) -> None:
    """Add the names of emulated recipes, all of them by default."""
    names = ", ".join(emulated_names())
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {names} (default: all)")


def parse_emulated(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, with `add_emulated`; an unknown recipe ends the process with the parser's error."""
    options, known = parser.parse_args(arguments), emulated_names()
    if unknown := [name for name in options.recipes if name not in known]:
        parser.error(f"no emulated recipe is called {unknown[0]!r}; there are {', '.join(known)}")
    options.recipes = options.recipes or known
    return options


def emulated_names() -> list[str]:
    return sorted(path.stem for path in EMULATED.glob("*.yaml"))


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as plain values, for the results."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


def write_json(path: Path, results: Any) -> Path:
    """Write results atomically, in a form that people can read, too; return the path."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return path


def append_row(path: Path, row: NamedTuple) -> None:
    """Append a finished cell to a CSV file, after the names of the columns in a new file."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([row._fields, row] if new else [row])
