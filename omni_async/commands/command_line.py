"""Provides the commands' common arguments, progress displays and output functions. Imports nothing heavy."""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_async.config import ConfigError
from omni_async.config.reading import is_within
from omni_async.config.redact import one_line, redact_text
from omni_async.config.writing import replacing, require_replaceable

# A text with such a start is a formula, or becomes one if leading blanks are dropped.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_MARKUP = str.maketrans({sign: f"\\{sign}" for sign in "\\`[<|"})
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")

# ---- arguments -------------------------------------------------------------------------------------------------------


GROUPS = ("start", "look at a run, and steer it", "get something out", "measure and predict", "extend")


def add_command(
    commands: Any, name: str, purpose: str, description: str, handler: str, group: str
) -> argparse.ArgumentParser:
    """Add a command, and return the parser of its arguments.

    Args:
        commands: the result of argparse's `add_subparsers`.
        name: the word on the command line.
        purpose: its line in the list of commands.
        description: its own help, shown with its line breaks.
        handler: `module:function`; (argparse.Namespace) -> exit code, imported when the command is used.
        group: its group in the program's help, one of `GROUPS`."""
    raw = argparse.RawDescriptionHelpFormatter
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=description, formatter_class=raw
    )
    added.set_defaults(handler=handler, group=group)
    return added


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add a recipe and its overrides, `recipe` and `overrides`, to a command's arguments."""
    parser.add_argument("recipe", type=Path, help="a YAML file; docs/configuration.md lists every key")
    more = "override a value of the recipe (values are YAML)"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=more)


def run_folder(text: str) -> Path:
    """Convert an argument that is a run's folder, or the name of a run in runs/ as the console prints it."""
    in_runs = Path("runs") / text
    return in_runs if not Path(text).exists() and in_runs.is_dir() else Path(text)


def positive(text: str) -> int:
    """Convert an argument that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


class PathsAndOverrides(argparse.Action):
    """Separates paths from `key.path=value`, which may be mixed; an ambiguous word is a path if such a file exists."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        overrides = [word for word in values if _OVERRIDE.match(word) and not Path(word).exists()]
        namespace.overrides = [*namespace.overrides, *overrides]
        namespace.paths = [Path(word) for word in values if word not in overrides]
        if not namespace.paths:
            parser.error("the following arguments are required: PATH")


# ---- lines -----------------------------------------------------------------------------------------------------------


def print_line(text: str) -> int:
    """Write a result to standard output and flush it, so that it is visible before any wait that it announces.

    Return the exit code 0."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return 0


def print_error(text: str) -> None:
    """Write one line to standard error, with secrets masked; `text` may contain foreign content."""
    sys.stderr.write(f"omni-async: {one_line(redact_text(text))}\n")
    sys.stderr.flush()


# ---- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def live_bar(*columns: str, total: int) -> Iterator[Callable[[str, int], None] | None]:
    """Show a bar on stderr, so that stdout holds only the result; yield None if stderr is no terminal.

    `columns`: `bar`, `done`, `left` and `elapsed` are progress; anything else is text. The yielded function takes a
    description, and how many of `total` are done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    kinds = {
        "bar": progress.BarColumn,
        "done": progress.MofNCompleteColumn,
        "left": progress.TimeRemainingColumn,
        "elapsed": progress.TimeElapsedColumn,
    }
    shown = [kinds[column]() if column in kinds else progress.TextColumn(column) for column in columns]
    with progress.Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, made: bar.update(task, completed=made, description=what)


# ---- results ---------------------------------------------------------------------------------------------------------


def require_writable(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Raise ConfigError, one line, before minutes of work if the file that `option` names cannot be written.

    Creates its folder. An existing file remains unchanged; a missing file remains missing.
    `inputs`: as for `require_no_input`."""
    if path is None:
        return
    require_no_input(option, path, inputs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_replaceable(path)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from None


def require_no_input(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise ConfigError, one line, if the file that `option` names is one of the `inputs`, under any name.

    `inputs`: files that the command reads, and folders that no file may be written into."""
    for given in inputs:
        try:
            is_input = path.exists() and path.samefile(given) if given.is_file() else is_within(path, given)
        except OSError:  # an unreachable file is not read, either
            continue
        if is_input:
            raise ConfigError(f"{option}: {path} is read by this command; name another file")


def require_apart(options: Iterable[tuple[str, Path | None]]) -> None:
    """Raise ConfigError, one line, if two options name the same file."""
    seen: dict[str, str] = {}
    for option, path in options:
        if path is not None and (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise ConfigError(f"{option}: {path} is written by {other}, too; name another file")


def require_outside(option: str, folder: Path, inputs: Iterable[Path]) -> None:
    """Raise ConfigError, one line, if the folder that `option` names is an input, or inside one."""
    for given in inputs:
        if is_within(folder, given):
            raise ConfigError(f"{option}: {folder} is in {given}, which this command reads; name another folder")


def write_results(writers: Mapping[Path, Callable[[Path], object]]) -> tuple[list[Path], int]:
    """Write results independently; report each failure in one line. Return the written paths and the exit code, 0 or 1.

    `writers`: maps a result's path to a function that fills a temporary file, which then replaces the result."""
    written = []
    for path, write in writers.items():
        try:
            with replacing(path, streams=True) as unfinished:
                write(unfinished)
        except OSError as error:
            sys.stderr.write(f"omni-async: {path} could not be written: {error.strerror or error}\n")
        else:
            written.append(path)
    return written, int(len(written) < len(writers))


def as_markdown(text: object) -> str:
    """Return a text as a line that Markdown shows literally: no image, HTML, code or further cell.

    Some renderers make links of plain addresses."""
    return one_line(" ".join(str(text).split())).translate(_MARKUP)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode rows of the same columns as CSV; no rows give no bytes.

    A text that a spreadsheet would run as a formula gets a `'` in front. Numbers are unchanged."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, fieldnames=[*rows[0]])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write_json(path: Path | None, content: bytes) -> int:
    """Write the file that `--json` names, if given. Return the exit code, as `write_results`."""
    return 0 if path is None else write_results({path: lambda path: path.write_bytes(content)})[1]


def newest_run(runs: Path) -> Path:
    """Return the newest run folder. ConfigError if none exists."""
    found = [path.parent for path in runs.glob("*/config.yaml")]
    if not found:
        raise ConfigError(f"there is no run in {runs.absolute()}; name a run folder")
    return max(found, key=lambda path: (path / "config.yaml").stat().st_mtime)
