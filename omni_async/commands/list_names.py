"""Implements `omni-async list`: the names that a recipe may use."""

from __future__ import annotations

import argparse
from typing import Any

from omni_async.commands.command_line import add_command, print_line

_LIST = """\
List the names that a recipe may use: model families (with their media, trained components, engines and batching),
engines, trainer backends, transitions, scorers, roles and algorithms, including the names from installed packages. WHAT
limits the list to one of these, lists the recipes in recipes/ (or else those of the package), or prints the pinned
versions that are tested together:

  omni-async list
  omni-async list scorers
  omni-async list recipes
  omni-async list constraints > constraints.txt
"""

LISTED = ("families", "engines", "backends", "transitions", "scorers", "roles", "programs", "algorithms", "recipes")
_ALSO = ("constraints",)


def add_list(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    purpose = "list model families, engines, algorithms, scorers, recipes and more"
    listed = add_command(commands, "list", purpose, _LIST, f"{__name__}:list_names", "start")
    listed.add_argument(
        "what", nargs="?", choices=(*LISTED, *_ALSO), metavar="WHAT", help=f"one of {', '.join((*LISTED, *_ALSO))}"
    )


def list_names(options: argparse.Namespace) -> int:
    """Return the exit code."""
    if options.what == "recipes":
        from omni_async.commands.scaffold.recipe_list import recipe_lines

        return print_line("\n".join(recipe_lines()))
    if options.what == "constraints":
        from omni_async.commands.scaffold.shipped import shipped

        return print_line(shipped("constraints.txt").read_text(encoding="utf-8").rstrip())
    from omni_async.runtime.preflight.listing import listing

    return print_line("\n".join(listing(options.what)))
