"""Defines the command line of `omni-async init`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_async.commands.command_line import add_command

_INIT = """\
Write a commented recipe for your model, prompts and reward. On a terminal it asks for every choice that the options
leave open, with a proposal; without a terminal, or with --yes, it takes the proposals. The recipe passes
`omni-async check`, unless it needs accelerators that this machine lacks:

  omni-async init my_recipe.yaml
  omni-async init my_recipe.yaml --model recipes/quickstart/checkpoint --prompts recipes/quickstart/prompts_train.jsonl
  omni-async init my_recipe.yaml --model models/Qwen-Image --prompts posters.txt --reward scene_text --devices 8 --yes
  omni-async init --from quickstart
  omni-async init my_recipe.yaml --reward pick_score --param path=models/PickScore_v1 rollout.sampling.height=1024

--from copies a folder of the recipes that come with omni_async, with its models and prompts, to recipes/ (`omni-async
list recipes` shows them). key.path=value sets any value of the recipe. A judge (vlm_judge) takes --param
model=FOLDER, which the run then serves, or a server's name and --param urls=[http://...].
"""
_PROMPTS = "prompts to train on: a folder, .txt, .jsonl, .json, .csv, .tsv, .parquet or .arrow, as data.prompts"


def add_init(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    purpose = "write a recipe for your model, prompts and reward"
    add = add_command(commands, "init", purpose, _INIT, "omni_async.commands.scaffold.init:init", "start").add_argument
    add("recipe", type=Path, nargs="?", help="file to write (default: recipe.yaml)")
    more = "values of the recipe (YAML)"
    add("overrides", nargs="*", default=[], metavar="key.path=value", help=more)
    add(
        "--from", dest="source", metavar="NAME", help="copy shipped recipes, for example quickstart, and write no other"
    )
    add("--model", metavar="PATH", help="checkpoint folder, or owner/name in a hub's cache here")
    add("--prompts", metavar="FILE", help=_PROMPTS)
    more = "prompts that are not trained on (default: for train.txt, test.txt in its folder; or split: a tenth of all)"
    add("--validation", metavar="FILE", help=more)
    add("--reward", metavar="NAME", help="a scorer; `omni-async list scorers` shows them")
    add("--param", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the scorer (YAML)")
    more = "an objective (default: flow_grpo, or token_grpo); `omni-async list algorithms`"
    add("--algorithm", metavar="NAME", help=more)
    add("--devices", metavar="N", help="accelerators to assign, 0: none (default: this machine's)")
    add("--yes", "--no-input", dest="ask", action="store_false", help="ask nothing")
