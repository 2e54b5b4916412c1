"""Implements `omni-async simulate`: its arguments, help, progress, printed output and files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import add_command, live_bar, positive, require_writable, write_json
from omni_async.commands.emulated import emulated
from omni_async.config import Config, ConfigError, load
from omni_async.config.load import inputs_of

if TYPE_CHECKING:
    from omni_async.performance.profile import Profile
    from omni_async.simulation.result import Simulated
    from omni_async.simulation.run_folder import MeasuredRun

_SIMULATE = """\
Predict a job before anything runs: the real control plane (admission, buffers, staleness, publishing) runs in virtual
time, on devices that take the times of a profile. The model, prompt files and scorers need not exist:

  omni-async simulate recipes/emulated/qwen_image_lora_h800.yaml
  omni-async simulate recipes/quickstart/quickstart.yaml --profile runs/my-run/profile.json --sweep
  omni-async simulate recipe.yaml --profile qwen_image_lora_h800 staleness.max_updates=4 rollout.workers=8
  omni-async simulate runs/quickstart-20260101-120000

For a run's folder, or with --what-if, the table has a row per change: another staleness budget, larger and smaller
buffers, one more rollout engine, reward worker or trainer rank. Gains are in samples/s. +- is the spread over seeds of
the service times and, for a run, the difference between its simulation and its measured time. If that is more than 3 %,
the output names the stage that differs, with its measured and its simulated seconds. The effect of a change on learning
is not simulated.

A profile contains the times of the stages: every run writes one (profile.json), some are shipped, and a recipe with
`emulation` names its own. Seconds are the profile's; emulation.time_scale plays no role. Validation rounds and
rejected groups are simulated for a run's folder alone. Checkpoints are left out.

The output has the law of overlap next to the simulation, samples/s of all devices, the activity of each role (starved:
it waits for input; backpressured: the staleness budget or a full buffer blocks it), the staleness of trained samples,
and the fill of the buffers. law / simulated near 1: only the bottleneck of the law limits the job. Below 1: buffers,
publishes, uneven batches or varying service times cost time. With --sweep: a row per schedule, and for async a row per
staleness budget.

Very large jobs are simulated in bundles of samples of a group; --bundle sets their size (1: every sample separately).
"""

_QUIET_S = 5.0
_SYNC_UPDATES = 40
_NARROWEST = 120  # columns; on narrower terminals lines wrap, which is better than truncated numbers


def add_simulate(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "simulate",
        "predict a job's throughput and staleness in virtual time",
        _SIMULATE,
        f"{__name__}:simulate_recipe",
        "measure and predict",
    )
    add_job(parser, "override a value of the recipe (values are YAML)", "a YAML file, or a past run's folder")
    add = parser.add_argument
    add("--updates", type=positive, metavar="N", help="updates to simulate (default: the recipe's, at least 200)")
    add("--seed", type=int, default=0, help="of the service times (default: 0)")
    add(
        "--bundle",
        type=positive,
        metavar="N",
        help="samples of a group simulated as one (default: as few as finish in about a minute)",
    )
    either = parser.add_mutually_exclusive_group()
    sweep = "compare all schedules, and staleness budgets 0, 1, 2, 4 and 8"
    either.add_argument("--sweep", action="store_true", help=sweep)
    either.add_argument(
        "--what-if", action="store_true", help="the gain of single changes (default for a run's folder)"
    )
    add("--json", type=Path, metavar="FILE", help="also write everything as JSON")


def add_job(parser: argparse.ArgumentParser, overrides: str, recipe: str = "a YAML file") -> None:
    """Add the arguments that name a job to predict: its recipe, overrides, its profile. The texts are the help."""
    add = parser.add_argument
    add("recipe", type=Path, metavar="RECIPE", help=recipe)
    add("overrides", nargs="*", default=[], metavar="key.path=value", help=overrides)
    add(
        "--profile",
        metavar="P",
        help="a profile.json, or the name of a shipped profile (default: the recipe's emulation.profile)",
    )


def simulate_recipe(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    if options.recipe.is_dir() or options.what_if:
        return _what_if(options)
    config, profile = job_of(options.recipe, options.overrides, options.profile)

    from rich.console import Console

    from omni_async.simulation.report import show, show_sweep
    from omni_async.simulation.simulate import simulate

    console = Console(width=max(_NARROWEST, Console().width), highlight=False, markup=False)
    samples = config.trainer.groups_per_update * config.rollout.group_size
    console.print(
        f"{options.recipe}: simulated with the times of profile {profile.name}: nothing is generated, scored or"
        f" trained; {samples} samples an update; {config.rollout.workers} engines, {config.reward.workers} reward"
        f" workers, {config.trainer.workers} trainer ranks"
    )
    if config.validation is not None:
        console.print("validation rounds are left out")
    if config.rollout.buckets:
        console.print("buckets are not told apart: every sample takes the profile's times and bytes")
    jobs, problems = _jobs(config, options)
    require_writable("--json", options.json, inputs_of(options.recipe, config))
    for line in (*problems, *_notes(jobs, profile)):
        console.print(line)
    results: list[tuple[str, Config, Simulated]] = []
    for name, job, updates in jobs:
        with live_bar("{task.description}", "bar", "done", "updates", "left", total=updates) as bar:
            progress = _lines(name, updates) if bar is None else partial(bar, name)
            found = simulate(job, profile, updates=updates, seed=options.seed, bundle=options.bundle, progress=progress)
        results.append((name, job, found))
    if options.sweep:
        show_sweep(console, results)
    else:
        (_, _, found), (_, _, in_step) = results
        show(console, config, found, in_step)
    if bundles := {found.bundle for _, _, found in results} - {1}:
        console.print(f"simulated in bundles of {max(bundles)} samples; --bundle 1 simulates every sample alone")
    return write_json(options.json, _as_json(options.recipe, profile, results))


def job_of(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str], profile: str | None
) -> tuple[Config, Profile]:
    """Return a recipe and the profile of its devices. Raises ConfigError, one line, if it cannot be simulated."""
    from omni_async.performance.profile import require_room
    from omni_async.roles.plan import require_trainable

    config = load(recipe, _with_profile(overrides, profile))
    found = profile_of(config, profile)
    require_trainable(config)
    require_room(config, found.payload)
    return config, found


def measured_job(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str], profile: str | None
) -> tuple[MeasuredRun, list[Path]]:
    """Return a run's recipe, profile and measured times, or a recipe and its profile; and the files that were read.

    Raises ConfigError, one line."""
    from omni_async.records.write.rundir import RunDirectory
    from omni_async.simulation.run_folder import MeasuredRun, read_measured

    path = None if isinstance(recipe, Mapping) else Path(recipe)
    if path is not None and path.is_dir():
        if overrides or profile is not None:
            given = overrides[0] if overrides else "--profile"
            raise ConfigError(
                f"{given}: the folder of a run has its recipe and its profile; give a recipe to change them"
            )
        return read_measured(path), RunDirectory(path).parts
    config = load(recipe, _with_profile(overrides, profile))
    return MeasuredRun(config, profile_of(config, profile), [], None), inputs_of(path, config)


def _what_if(options: argparse.Namespace) -> int:
    """Predict the gains of single changes to a finished run, or to a job described by a recipe and a profile."""
    import msgspec
    from rich.console import Console

    from omni_async.simulation.report import show_what_if
    from omni_async.simulation.what_if import what_if

    for name in ("sweep", "updates", "bundle"):
        if getattr(options, name):
            raise ConfigError(f"--{name}: not for what one change would buy; leave it out")
    run, inputs = measured_job(options.recipe, options.overrides, options.profile)
    require_writable("--json", options.json, inputs)
    with live_bar("{task.description}", "bar", total=100) as bar:
        progress = None if bar is None else lambda made, jobs, name: bar(name, 100 * made // jobs)
        found = what_if(*run[:3], **run.comparison, seed=options.seed, progress=progress)
    console = Console(width=max(_NARROWEST, Console().width), highlight=False, markup=False)
    if options.recipe.is_dir() and (marked := emulated(msgspec.to_builtins(run.config))):
        console.print(f"{options.recipe}: {marked}", soft_wrap=True)
    show_what_if(console, found)
    return write_json(options.json, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def _with_profile(overrides: Sequence[str], profile: str | None) -> list[str]:
    return [*overrides, *([] if profile is None else [f"emulation.profile={json.dumps(profile)}"])]


def profile_of(config: Config, name: str | None) -> Profile:
    """Load the profile that `--profile` names (None: the recipe's). ConfigError, one line, if none exists."""
    from omni_async.performance.profile import load_profile, require_times, shipped_profiles

    if name is None and config.emulation is None:
        raise ConfigError(
            "--profile: required, because the recipe has no emulation.profile; a run's profile.json, or one of"
            f" {', '.join(shipped_profiles())}"
        )
    named = config.emulation.profile if name is None and config.emulation is not None else name
    try:
        found = load_profile(named or "")
        require_times(config, found)
    except ConfigError as error:
        if name is None:
            raise
        raise ConfigError(str(error).replace("emulation.profile", "--profile", 1)) from None
    return found


def _jobs(config: Config, options: argparse.Namespace) -> tuple[list[tuple[str, Config, int]], list[str]]:
    """Return the jobs to simulate, each with its number of updates, and why others cannot be simulated.

    ConfigError if an option does not fit."""
    from omni_async.simulation.simulate import Steady, default_updates
    from omni_async.simulation.sweep import arms, in_bundles, scheduled

    updates = options.updates or default_updates(config)
    chosen, problems = [("this recipe", config, updates), ("sync", scheduled(config, "sync"), _SYNC_UPDATES)], []
    if options.sweep:
        found = arms(config)
        problems = [f"{arm.name}: left out: {arm.problem}" for arm in found if arm.problem is not None]
        chosen = [(arm.name, arm.config, updates) for arm in found if arm.problem is None]
        if not chosen:
            raise ConfigError(f"--sweep: the recipe runs under no schedule; {problems[0]}")
    try:
        in_bundles(config, 1 if options.bundle is None else options.bundle)
        for _, job, updates in chosen:
            Steady(job, updates)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    return chosen, problems


def _notes(jobs: list[tuple[str, Config, int]], profile: Profile) -> list[str]:
    """List the stages without a time in the profile, and the jobs that need them."""
    from omni_async.simulation.result import not_measured

    needed_by: dict[str, list[str]] = defaultdict(list)
    for name, job, _ in jobs:
        for note in not_measured(job, profile):
            needed_by[note].append(name)
    return [note if len(names) == len(jobs) else f"{', '.join(names)}: {note}" for note, names in needed_by.items()]


def _lines(name: str, updates: int) -> Callable[[int], None]:
    """Return a progress callback that prints every few seconds."""
    last_report = time.monotonic()

    def report(version: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _QUIET_S:
            last_report = time.monotonic()
            sys.stderr.write(f"{name}: update {version} of {updates}\n")

    return report


def _as_json(recipe: Path, profile: Profile, results: list[tuple[str, Config, Simulated]]) -> bytes:
    import msgspec

    rows = [
        {
            "name": name,
            "staleness_budget": config.staleness.max_updates,
            "bound_fraction": found.bound_fraction,
            **msgspec.to_builtins(found),
        }
        for name, config, found in results
    ]
    content = msgspec.json.encode({"recipe": str(recipe), "profile": profile.name, "results": rows})
    return msgspec.json.format(content, indent=2) + b"\n"
