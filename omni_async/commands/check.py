"""Implements `omni-async check`: validates a recipe, or estimates its memory on a device."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from msgspec.structs import replace

from omni_async.commands.command_line import add_command, add_recipe, print_error, print_line
from omni_async.config import Config, load, resolved_yaml
from omni_async.config.role_table import roles_of
from omni_async.config.schedule import num_devices
from omni_async.worker import COORDINATOR

_CHECK = """\
Validate a recipe without starting anything: its values, its checkpoint folder, every line of its prompt files, its
scorers' parameters and what they need of each prompt. Scorers are loaded and score a synthetic sample (not with
--no-probe). Then print the recipe with every default filled in, the warnings, and whether it can run. The output is
itself a recipe (with credentials masked):

  omni-async check recipes/quickstart/quickstart.yaml
  omni-async check recipes/quickstart/quickstart.yaml trainer.updates=5 > short.yaml

With --device, estimate the memory of every role on such an accelerator instead, and refuse what does not fit. This
needs no accelerator, no prompts and no weights. Without a checkpoint at model.path it uses the configuration of the
published model of that name:

  omni-async check recipes/qwen_image_ocr/flow_grpo_lora.yaml --device h100-80g
  omni-async check recipes/qwen_image_ocr/flow_grpo_full.yaml --device h200 trainer.workers=4
  omni-async check recipes/wan22_dance/dance_grpo.yaml --device 48
"""


_WARNING = "warning: "


def add_check(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    purpose = "validate a recipe and print it with every default filled in"
    check = add_command(commands, "check", purpose, _CHECK, f"{__name__}:check", "start")
    add_recipe(check)
    check.add_argument(
        "--no-probe", action="store_true", help="do not load the scorers and let them score a synthetic sample"
    )
    devices = "h100-80g, h200, h800, ascend-64g or a number of GiB"
    check.add_argument("--device", help=f"estimate the memory on such an accelerator alone: {devices}")


def check(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for a recipe that cannot run."""
    config = load(options.recipe, options.overrides)
    if options.device is not None:
        from omni_async.commands.memory.command import memory

        return memory(config, options.device)

    from omni_async.runtime.preflight.check import preflight

    with contextlib.redirect_stdout(sys.stderr):  # the output of a scorer's module is no part of the recipe
        inputs = preflight(config, tell=_show)
    notes, answers = [note for note in inputs.notes if note.startswith(_WARNING)], list[str]()
    if not options.no_probe:
        from omni_async.runtime.preflight.scorers import try_scorers

        _show("trying the scorers")
        tried = try_scorers(inputs)
        notes += tried.notes
        answers = [f"# {line}" for line in tried.answers]
    print_line("\n".join([resolved_yaml(config).rstrip(), *answers]))
    # A terminal shows the end of so many lines.
    for note in notes:
        print_error(note)
    return print_line("\n".join(_verdict(config, sum(note.startswith(_WARNING) for note in notes))))


def _show(text: str) -> None:
    """Show a phase to a person; a log gets only results and warnings."""
    if sys.stderr.isatty():
        print_error(text)


def _verdict(config: Config, warnings: int) -> list[str]:
    """Return the result for a recipe that passed every check, as comments below the recipe."""
    counted = f"{warnings} warning{'s' * (warnings != 1)}" if warnings else "no warnings"
    trainer, budget = config.trainer, config.staleness.max_updates
    groups = f"{trainer.groups_per_update} groups x {config.rollout.group_size} samples"
    batch = f"{groups}, each at most S = {budget} update{'s' * (budget != 1)} old"
    if config.data.preferences is not None:
        batch = f"{trainer.groups_per_update} preference pairs"
    # One emulated rank stands for all.
    job = replace(config, emulation=None)
    workers = {role: len(spec.workers(job)) for role, spec in roles_of(job).items() if role != COORDINATOR}
    shown = ", ".join(f"{role} {number}" for role, number in workers.items() if number)
    has_accelerators = any(resources.gpus for resources in config.resources.values())
    kind = f"{'emulated ' * (config.emulation is not None)}{'accelerators' if has_accelerators else 'CPUs'}"
    return [
        f"# ready to run, with {counted}: {trainer.updates} updates of {batch}",
        f"# workers on {num_devices(config):g} {kind}: {shown}",
    ]
