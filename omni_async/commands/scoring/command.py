"""Implements `omni-async score`: its arguments, help, progress, printed output and files."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import (
    PathsAndOverrides,
    add_command,
    live_bar,
    positive,
    print_error,
    require_apart,
    require_no_input,
    require_writable,
    write_results,
)
from omni_async.config import Config, ConfigError, load
from omni_async.config.load import inputs_of

if TYPE_CHECKING:
    from omni_async.commands.scoring.scoring import Scored

_SCORE = """\
Score images, videos, sound and texts with a recipe's reward, as a run does, to examine a reward before training on it.
The model is not loaded and need not exist. Judge servers that the reward names are started and stopped:

  omni-async score recipes/quickstart/quickstart.yaml recipes/tiny/images 'reward.scorers=[{name: jpeg_size}]'
  omni-async score recipes/quickstart/quickstart.yaml runs/quickstart-20260101-120000 --grid extremes.png
  omni-async score my_recipe.yaml images/ table.jsonl --repeat 5 --out scores.csv --json scores.json

A PATH is a media file, a folder of them, the folder of a run (its samples), or a table (.jsonl, .json, .csv, .tsv,
.parquet, .arrow, a folder with metadata.jsonl) with columns prompt, image, video or audio (files in its folder or
below) or text (the text itself), and optionally target; other columns are metadata. data.columns of the recipe names
the table's columns.
The prompt of a.png is in a.txt or a.json (an object as in a prompt file), or in the folder's prompts.txt or
prompts.jsonl, with a line per file in the order of their names.

The output has mean, standard deviation and quantiles of the reward and of its parts, a histogram, the best and the
worst samples, and the reasons why samples could not be scored. --repeat N scores every sample N times; `own std` is
then the judge's noise, and should be small against the standard deviation between samples. The file
reward.cache.path=FILE keeps scores of deterministic scorers, and later calls reuse them (not with --repeat).

Exit codes: 0 done, 1 nothing could be scored or a result could not be written, 2 wrong arguments, 130 Ctrl-C (finished
scores are printed and written).
"""


_OUTPUTS = ("out", "json", "grid")


def add_score(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "score",
        "score files with a recipe's reward, and show what it does",
        _SCORE,
        f"{__name__}:score",
        "get something out",
    )
    add = parser.add_argument
    add("recipe", type=Path, metavar="RECIPE", help="a YAML file; its reward section counts")
    more = "what to score; and values of the recipe to override, as key.path=value (YAML)"
    add("paths", nargs="+", action=PathsAndOverrides, metavar="PATH", help=more)
    parser.set_defaults(overrides=[])
    add("--repeat", type=positive, default=1, metavar="N", help="times that every sample is scored (default: 1)")
    add("--out", type=Path, metavar="FILE", help="write a row per sample, as .csv or .parquet")
    add("--json", type=Path, metavar="FILE", help="write statistics and rows as JSON")
    add("--grid", type=Path, metavar="FILE", help="write the worst and the best samples as an image, such as .png")


def score(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    config = load(options.recipe, options.overrides)
    _check_outputs(options)

    from omni_async.commands.scoring.samples import files_read
    from omni_async.commands.scoring.scoring import build_reward, prompt_checks, rows_of

    rows = rows_of(config, options.paths)
    inputs = [*inputs_of(options.recipe, config), *files_read(options.paths, [row.sample for row in rows])]
    for name in _OUTPUTS:
        if (path := getattr(options, name)) is not None:
            require_no_input(f"--{name}", path, inputs)
    checks = prompt_checks(config, [row.sample for row in rows])
    without = sum(not row.sample.prompt.text for row in rows)
    if without:
        print_error(f"{without} of {len(rows)} samples have no prompt; a .txt file of the same name gives one")
    reward = build_reward(config)
    with live_bar("scores", "bar", "done", "elapsed", "left", total=len(rows) * options.repeat) as bar:
        progress: Callable[[int], None] = (lambda done: None) if bar is None else lambda done: bar("", done)
        code = _interruptible(config, reward, rows, checks, options.repeat, progress)
    return _conclude(options, rows, code)


def _interruptible(
    config: Config, reward: Any, rows: list[Scored], checks: Sequence[Any], repeat: int, progress: Callable[[int], None]
) -> int:
    """Score into `rows`. Returns 0, or the exit code of an early end."""
    from omni_async.commands.scoring.scoring import score_samples
    from omni_async.rewards.calls import ScorerHangs

    try:
        asyncio.run(score_samples(config, reward, rows, checks, repeat, progress))
    except KeyboardInterrupt:
        print_error("interrupted; what was scored is kept")
        return 130
    except ScorerHangs as error:
        print_error(f"stopped: {error}")
        return 1
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse outputs now that could not be written after minutes of scoring."""
    if options.out is not None and options.out.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"--out: expected a file that ends in .csv or .parquet, got {options.out}")
    if options.grid is not None:
        from PIL import Image

        if options.grid.suffix.lower() not in Image.registered_extensions():
            raise ConfigError(f"--grid: expected an image file, such as {options.grid.stem}.png, got {options.grid}")
    require_apart((f"--{name}", getattr(options, name)) for name in _OUTPUTS)
    for name in _OUTPUTS:
        require_writable(f"--{name}", getattr(options, name))


def _conclude(options: argparse.Namespace, rows: list[Scored], code: int) -> int:
    """Write and print the scores, and return the exit code. Files come first: the reader of the output may leave."""
    from rich.console import Console

    from omni_async.commands.scoring.report import show

    done = [row for row in rows if row.scores or row.error is not None]
    unwritten = _write(options, done)
    show(Console(width=max(120, Console().width), highlight=False), done, options.repeat)
    if len(done) < len(rows):
        print_error(f"{len(rows) - len(done)} of {len(rows)} samples were not reached")
    return code or unwritten or int(not any(row.scores for row in rows))


def _write(options: argparse.Namespace, done: list[Scored]) -> int:
    """Write the requested files. Return the exit code, as `write_results`."""
    from omni_async.commands.scoring.report import as_json, write_grid, write_rows

    writers: dict[Path, Callable[[Path], object]] = {}
    if options.json is not None:
        writers[options.json] = lambda path: path.write_bytes(as_json(options.recipe, done, options.repeat))
    scored = any(row.scores for row in done)
    for path, write, has_any in ((options.out, write_rows, bool(done)), (options.grid, write_grid, scored)):
        if path is not None and has_any:
            writers[path] = partial(_written, write, done)
        elif path is not None:
            print_error(f"{path}: not written, because no sample has a score")
    return write_results(writers)[1]


def _written(write: Callable[[Path, list[Scored]], object], rows: list[Scored], path: Path) -> None:
    write(path, rows)
