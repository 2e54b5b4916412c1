"""Implements `omni-async list`: the names that a recipe may use."""

from __future__ import annotations

import argparse
from typing import Any

from omni_async.commands.command_line import add_command, print_line

_LIST = """\
List the names that a recipe may use: model families (with their media, trained components, engines and batching),
engines, trainer backends, transitions, scorers, roles and algorithms, including the names from installed packages. WHAT
limits the list to one of these, or lists the recipes of the repository (which an installed package lacks):

  omni-async list
  omni-async list scorers
  omni-async list recipes
"""

LISTED = ("families", "engines", "backends", "transitions", "scorers", "roles", "programs", "algorithms", "recipes")


def add_list(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    purpose = "list model families, engines, algorithms, scorers, recipes and more"
    listed = add_command(commands, "list", purpose, _LIST, f"{__name__}:list_names", "start")
    listed.add_argument("what", nargs="?", choices=LISTED, metavar="WHAT", help=f"one of {', '.join(LISTED)}")


def list_names(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, if there is no folder of recipes."""
    if options.what == "recipes":
        from omni_async.commands.scaffold.recipe_list import recipe_lines

        return print_line("\n".join(recipe_lines()))
    from omni_async.runtime.preflight.listing import listing

    return print_line("\n".join(listing(options.what)))
