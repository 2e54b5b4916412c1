"""Implements `omni-async report`: its arguments, its help, and its output."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from omni_async.commands.command_line import add_command, require_no_input, run_folder
from omni_async.commands.emulated import emulated
from omni_async.config import ConfigError
from omni_async.config.reading import real_path
from omni_async.config.redact import one_line
from omni_async.config.section import size_text

_REPORT = """\
Write a page about one or several runs: the outcome, samples over time, learning curves and their cost, waits between
roles, staleness, drift, faults and the configuration. It is one HTML file that opens in a browser without a network
and can be sent to others. Running, killed and resumed runs have a page too:

  omni-async report runs/quickstart-20260101-120000
  omni-async report runs/sync-20260101-130000 runs/quickstart-20260101-120000 --out comparison.html

A comparison begins with the faster recipe: seconds to the highest reward that both reached, seconds per update, and
the difference of the final rewards with its interval. The first recipe is the baseline. Runs that differ in run.seed
alone are one recipe: they are drawn as their mean, with the range of the seeds.

Exit codes: 0 done, 1 the page could not be written, 2 wrong arguments.
"""
DEFAULT = "report.html"


def add_report(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "report",
        "make a page of runs: one HTML file that opens offline",
        _REPORT,
        f"{__name__}:report",
        "look at a run, and steer it",
    )
    parser.add_argument("runs", nargs="+", type=run_folder, metavar="RUN", help="a run folder, or its name in runs/")
    where = f"file to write (default: {DEFAULT} in the first run folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=where)


def report(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for a path that is no run folder."""
    from omni_async.commands.report.data import page_of
    from omni_async.commands.report.file import one_file
    from omni_async.config.writing import write_atomic
    from omni_async.records.read.record import read_run
    from omni_async.records.write.rundir import RunDirectory

    folders = [*dict.fromkeys(real_path(path) for path in options.runs)]
    out: Path = options.out or folders[0] / DEFAULT
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file in it, such as {out / DEFAULT}")
    require_no_input("--out", out, [part for folder in folders for part in RunDirectory(folder).parts])
    runs = [read_run(folder) for folder in folders]
    named = (run.setting(key) for run in runs for key in ("data.prompts", "data.preferences", "validation.prompts"))
    require_no_input("--out", out, [Path(one) for one in named if isinstance(one, str) and "\0" not in one])
    page = page_of(runs, f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}")
    content = one_file(page).encode(errors="replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, content, streams=options.out is not None)
    except OSError as error:
        sys.stderr.write(f"omni-async: --out: cannot write {one_line(str(out))}: {error.strerror or error}\n")
        return 1
    marked = dict.fromkeys(f"{text}\n" for run in runs if (text := emulated(run.config)))
    what = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    where, quoted = one_line(str(out)), one_line(shlex.quote(str(out)))
    sys.stdout.write(
        f"{one_line(page['sections'][0]['title'])}\n"
        f"{''.join(marked)}"
        f"{where}: {what}, {size_text(len(content))}\n"
        f"open it in a browser (xdg-open {quoted}), or send it as it is: it needs no network and no other file\n"
    )
    return 0
