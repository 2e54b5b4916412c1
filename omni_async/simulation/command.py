"""Implements `omni-async simulate`: its arguments, its help, its progress, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.config import Config, ConfigError, load

if TYPE_CHECKING:
    from omni_async.performance.profile import Profile
    from omni_async.simulation.result import Simulated

_SIMULATE = """\
Predict a job before anything runs: its real control plane (admission, buffers, staleness, publishing) in virtual
time, with devices that take a profile's time. Neither the model nor prompt files nor scorers need to exist:

  omni-async simulate recipes/emulated/qwen_image_lora_h800.yaml
  omni-async simulate recipes/quickstart/quickstart.yaml --profile runs/my-run/profile.json --sweep
  omni-async simulate recipe.yaml --profile qwen_image_lora_h800 staleness.max_updates=4 rollout.workers=8

A profile says how long stages take: every run writes one (profile.json), some are shipped, and a recipe with
`emulation` names its own. Seconds are the profile's; emulation.time_scale plays no role. Validation rounds and
checkpoints are left out, and no group is rejected.

Printed are the law of overlap beside the simulation, images/s over all devices, what each role does (starved: it
waits for input; backpressured: the staleness budget or a full buffer holds it up), how old the samples are that are
trained on, and how full the buffers are. law / simulated close to 1: nothing but the law's bottleneck holds the job
up. Below 1: buffers, publishes, uneven batches or varying service times cost something. With --sweep: a row per
schedule, and for async one per staleness budget.

Very large jobs are simulated in bundles, samples of a group that stay together; --bundle sets how many (1: every sample
alone).
"""

_QUIET_S = 5.0
_SYNC_UPDATES = 40
_NARROWEST = 120  # columns; narrower terminals wrap lines, which is better than cutting numbers off


def add_simulate(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parser = commands.add_parser(
        "simulate",
        help="predict a job's throughput and staleness in virtual time",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser, "override a value of the recipe (values are YAML)")
    add = parser.add_argument
    add("--updates", type=positive, metavar="N", help="updates to simulate (default: the recipe's, at least 200)")
    add("--seed", type=int, default=0, help="of the service times (default: 0)")
    add(
        "--bundle",
        type=positive,
        metavar="N",
        help="samples of a group simulated as one (default: as few as finish in about a minute)",
    )
    add("--sweep", action="store_true", help="compare all schedules, and staleness budgets 0, 1, 2, 4 and 8")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON, too")


def add_job(parser: argparse.ArgumentParser, overrides: str) -> None:
    """Add what names a job to predict: its recipe, changes of it (`overrides`: the help), its profile."""
    add = parser.add_argument
    add("recipe", type=Path, metavar="RECIPE", help="a YAML file")
    add("overrides", nargs="*", default=[], metavar="key.path=value", help=overrides)
    add(
        "--profile",
        metavar="P",
        help="a profile.json, or the name of a shipped profile (default: the recipe's emulation.profile)",
    )


def positive(text: str) -> int:
    """Convert an argument that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def simulate_recipe(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for what is wrong with the arguments."""
    from omni_async.actors.plan import require_trainable
    from omni_async.performance.profile import require_room

    named = [] if options.profile is None else [f"emulation.profile={json.dumps(options.profile)}"]
    config = load(options.recipe, [*options.overrides, *named])
    profile = profile_of(config, options.profile)
    require_trainable(config)
    require_room(config, profile.payload)

    from rich.console import Console

    from omni_async.simulation.report import show, show_sweep
    from omni_async.simulation.simulate import simulate

    console = Console(width=max(_NARROWEST, Console().width), highlight=False)
    samples = config.trainer.groups_per_update * config.rollout.group_size
    console.print(
        f"{options.recipe}: profile {profile.name}; {samples} samples an update; {config.rollout.workers} engines,"
        f" {config.reward.workers} reward workers, {config.trainer.workers} trainer ranks"
    )
    if config.validation is not None:
        console.print("validation rounds are left out")
    if config.rollout.buckets:
        console.print("buckets are not told apart: every sample takes the profile's times and bytes")
    jobs, problems = _jobs(config, options)
    if options.json is not None:
        write_json(options.json, b"")  # better refused now than after minutes
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
    if options.json is not None:
        write_json(options.json, _as_json(options.recipe, profile, results))
    return 0


def profile_of(config: Config, name: str | None) -> Profile:
    """Load the profile that `--profile` names (None: the recipe's). ConfigError, one line, if there is none."""
    from omni_async.performance.profile import load_profile, shipped_profiles

    if name is None:
        if config.emulation is None:
            raise ConfigError(
                "--profile: required, because the recipe has no emulation.profile; a run's profile.json, or one of"
                f" {', '.join(shipped_profiles())}"
            )
        return load_profile(config.emulation.profile)
    try:
        return load_profile(name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("emulation.profile", "--profile", 1)) from None


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
    try:
        in_bundles(config, 1 if options.bundle is None else options.bundle)
        for _, job, updates in chosen:
            Steady(job, updates)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    return chosen, problems


def _notes(jobs: list[tuple[str, Config, int]], profile: Profile) -> list[str]:
    """List the stages that the profile has no time for, and which of the jobs need them."""
    from omni_async.simulation.result import not_measured

    needed_by: dict[str, list[str]] = defaultdict(list)
    for name, job, _ in jobs:
        for note in not_measured(job, profile):
            needed_by[note].append(name)
    return [note if len(names) == len(jobs) else f"{', '.join(names)}: {note}" for note, names in needed_by.items()]


@contextmanager
def live_bar(*columns: str, total: int) -> Iterator[Callable[[str, int], None] | None]:
    """Show a bar on stderr, so that stdout is the result alone; yields None where stderr is no terminal.

    `columns`: `bar`, `done`, `left` and `elapsed` are progress; anything else is text. What is yielded takes a
    description, and how many of `total` are made."""
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


def _lines(name: str, updates: int) -> Callable[[int], None]:
    """Return what writes a line now and then."""
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


def write_json(path: Path, content: bytes) -> None:
    """Write the file that `--json` names. ConfigError, one line, if that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror or error}") from None
