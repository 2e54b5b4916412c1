"""Implements `omni-async data`: its arguments, help and printed output."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from omni_async.commands.command_line import (
    add_command,
    print_error,
    print_line,
    require_no_input,
    require_writable,
    write_results,
)
from omni_async.config import load

_DATA = """\
Examine a table of prompts before a run reads it, or convert the prompts of a public benchmark:

  omni-async data check prompts.jsonl
  omni-async data check prompts.csv --recipe my_recipe.yaml data.columns.prompt=caption
  omni-async data convert ocr train.txt --out prompts.jsonl
"""
_CHECK = """\
Read a table of prompts, and report every row that a run would refuse, rows that repeat a prompt, texts with invisible
characters, and lines that end with a carriage return alone:

  omni-async data check prompts.jsonl
  omni-async data check prompts.parquet data.columns.prompt=caption
  omni-async data check prompts.txt --recipe recipes/quickstart/quickstart.yaml

With --recipe, its `data` section applies, and its model's tokenizers count the tokens of every prompt.

Exit codes: 0 a run can read it, 1 a run would refuse it, 2 wrong arguments.
"""
_CONVERT = """\
Convert the prompts of a public benchmark to a table:

  omni-async data convert ocr train.txt --out prompts.jsonl            # flow_grpo: the text in quotes is the target
  omni-async data convert geneval train_metadata.jsonl --out p.jsonl   # checked for the scorer object_checks
  omni-async data convert t2i_compbench color_train.txt --out p.jsonl  # the file's name is the category
  omni-async data convert pickscore train.txt --out p.jsonl            # without repeated prompts
  omni-async data convert pickscore pickapic.parquet --out pairs.parquet   # pairs with a winner, for diffusion_dpo
"""
FORMATS = ("geneval", "ocr", "pickscore", "t2i_compbench")


def add_data(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    group = "start"
    data = add_command(commands, "data", "examine or convert a table of prompts", _DATA, f"{__name__}:check", group)
    kinds = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    purpose = "report what a run would refuse, and what is probably not meant"
    check_ = add_command(kinds, "check", purpose, _CHECK, f"{__name__}:check", group)
    check_.add_argument("file", metavar="FILE", help="a file, a folder, or a data set in the hub's cache, owner/name")
    more = "override a value of the recipe's section data (values are YAML)"
    check_.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=more)
    check_.add_argument("--recipe", type=Path, metavar="RECIPE", help="a YAML file; its model counts tokens")
    purpose = "convert the prompts of a public benchmark"
    convert_ = add_command(kinds, "convert", purpose, _CONVERT, f"{__name__}:convert", group)
    convert_.add_argument("format", choices=FORMATS, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}")
    convert_.add_argument("file", metavar="FILE", help="the benchmark's file")
    out = "the table to write: .jsonl, or .parquet of pairs"
    convert_.add_argument("--out", type=Path, metavar="FILE", required=True, help=out)


def check(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for a file that cannot be read or a wrong recipe."""
    from omni_async.commands.data.examine import examined
    from omni_async.config.load import decode
    from omni_async.config.schema import Data
    from omni_async.config.tree import overridden

    config, given = None, dict[str, Any](data={})
    if options.recipe is not None:
        config = load(options.recipe, options.overrides)
        given = {"data": to_builtins(config.data)}
    tree = overridden(given, [*options.overrides, f"data.prompts={json.dumps(options.file)}"], Path(options.file))
    found = examined(decode(tree["data"], Data, "data"), config)
    for line in found.errors:
        print_error(line)
    code = print_line("\n".join(found.lines))
    return 1 if found.errors else code


def convert(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for a file of another format."""
    from omni_async.commands.data.convert import converted

    require_no_input("--out", options.out, [Path(options.file)])
    require_writable("--out", options.out)
    result = converted(options.format, options.file, options.out.suffix.lower())
    written, code = write_results({options.out: result.write})
    return code or print_line("\n".join([*(f"wrote {path}: {result.summary}" for path in written), *result.notes]))
