"""Implements `omni-async train`: checks the recipe, runs the job, and returns the exit code."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import add_command, add_recipe, print_error, print_line
from omni_async.config import Config, ConfigError, load

if TYPE_CHECKING:
    from omni_async.records.write.summary import Summary

_TRAIN = """\
Train from a recipe. Every value of the YAML file can be overridden on the command line:

  omni-async train recipes/quickstart/quickstart.yaml
  omni-async train recipes/quickstart/quickstart.yaml staleness.max_updates=0 run.name=sync
  omni-async train recipes/quickstart/quickstart.yaml rollout.workers=2 trainer.workers=2
  omni-async train recipes/quickstart/quickstart.yaml --timing     # which stage of the start takes how long

A run leaves a folder in run.dir (default: runs/) with its configuration, ledger, metrics, samples, checkpoints,
timeline and summary.
"""


def add_train(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    train = add_command(commands, "train", "train from a recipe", _TRAIN, f"{__name__}:train", "start")
    add_recipe(train)
    train.add_argument("--timing", action="store_true", help="show the seconds of the start, by process and stage")


def train(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, before anything starts."""
    from omni_async.runtime.preflight.resume import nothing_to_do
    from omni_async.runtime.start_times import StartTiming

    config = load(options.recipe, options.overrides)
    if (done := nothing_to_do(config)) is not None:
        return print_line(done)
    summary = run_to_its_end(config, timing=StartTiming(options.timing))
    from omni_async.runtime.driver.train import EXIT_CODES

    for problem in problems_of(summary):
        print_error(problem)
    if summary.unwritten:
        return 1
    return EXIT_CODES[summary.status]


def problems_of(summary: Summary) -> list[str]:
    """Return a line for each problem of a run that has ended."""
    failed = [f"the run failed: {summary.reason}"] if summary.status == "failed" else []
    lost = ", ".join(f"{name} ({why})" for name, why in summary.unwritten.items())
    return [*failed, *([f"not everything could be written: {lost}"] if lost else [])]


def run_to_its_end(config: Config, **hooks: Any) -> Summary:
    """Check a recipe and run it. `hooks`: arguments of the driver's `train`. Raises ConfigError, one line."""
    from omni_async.records.write.console import LineConsole
    from omni_async.runtime.preflight.check import preflight

    # There is no run yet, and no live display, that could show the phases.
    inputs = preflight(config, tell=LineConsole(sys.stdout, config.trainer.updates).phase)

    from omni_async.records.write.rundir import RunDirectoryError
    from omni_async.records.write.sinks.base import SinkUnusableError
    from omni_async.runtime.driver import train as driver

    try:
        return driver.train(inputs, **hooks)
    except (RunDirectoryError, SinkUnusableError) as error:
        raise ConfigError(str(error)) from None
