"""Makes the command lines of benchmarks alike."""

from __future__ import annotations

import argparse
from pathlib import Path


def benchmark_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser for `python -m benchmarks.<name>` with the option `--out`; `description` is shown as it is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = Path("runs/bench") / name
    parser.add_argument("--out", type=Path, default=folder, help=f"folder for results.json (default: {folder})")
    return parser
