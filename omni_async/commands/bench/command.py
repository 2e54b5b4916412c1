"""Implements `omni-async bench`: its arguments, its help, and its exit codes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from omni_async.commands.command_line import add_command, positive
from omni_async.config import ConfigError

_BENCH = """\
Measure a recipe on this machine:

  omni-async bench overlap recipes/quickstart/quickstart.yaml --updates 16 --arms sync,async:2
"""

_OVERLAP = """\
Run a recipe under several schedules, one after the other and in rounds, and show what overlapping generation, scoring
and training gains:

  omni-async bench overlap recipes/quickstart/quickstart.yaml --updates 16 --arms sync,async_reward,async:1,async:2
  omni-async bench overlap recipe.yaml --profile runs/my-run/profile.json --updates 30 emulation.time_scale=0.1
  omni-async bench overlap runs/overlap-quickstart --report

Arms are the same runtime with other keys (docs/tuning.md); every arm does the same work, with the same off-policy
correction:

  sync            generate, score, train, publish, one after the other
  sync_colocated  the same, with every stage on all devices in turn
  async_reward    samples are scored while others are generated
  one_step_off    the next update's samples are generated while one is trained
  async:S         all stages overlap; samples are at most S updates old

A recipe with `emulation` replays a profile on emulated devices (--profile replaces it, or adds it to any recipe); any
other recipe really generates and trains. Arms that a recipe rules out are skipped, with the reason. Step times leave
out the first max(2, S + 2) and the last S updates of a run.

The output begins with the answer: the seconds per update that the fastest arm saves over sync, and their causes, such
as generation overlapped with training. The causes sum to the measured difference; time without an active role is a
cause. The table has, per arm: seconds per update (median and quartiles over the repeats), the law's and the simulator's
prediction, trained samples/s over all devices (not for scaled time), tokens/s of answers, speed-ups, the parts of the
trainer's time, how busy each role was, and the staleness of trained samples. The law uses the profile of emulated
devices; otherwise it uses the service times measured in the sync arm.

OUT gets overlap.json (everything, each run's numbers included), overlap.html (one file that opens offline), overlap.md,
overlap.png and runs/. Ctrl-C keeps finished runs, and the same command resumes with the rest. Exit codes: 0 done, 1 a
run failed, 2 wrong configuration or usage, 130 interrupted.
"""


def add_bench(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    bench = add_command(
        commands,
        "bench",
        "measure a recipe on this machine",
        _BENCH,
        f"{__name__}:bench",
        "measure and predict",
    )
    kinds = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    purpose = "the schedules side by side: what overlapping the stages gains"
    overlap = add_command(kinds, "overlap", purpose, _OVERLAP, f"{__name__}:bench", "measure and predict")
    add = overlap.add_argument
    add("recipe", type=Path, metavar="RECIPE", help="a YAML file; with --report the folder of a benchmark")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="override a value of the recipe in every arm (values are YAML)",
    )
    add(
        "--profile",
        metavar="P",
        help="replay this profile on emulated devices: a profile.json, or the name of a shipped one",
    )
    add("--repeats", type=positive, default=5, metavar="N", help="rounds, each with one run of every arm (default: 5)")
    length = overlap.add_mutually_exclusive_group()
    length.add_argument(
        "--updates",
        type=positive,
        metavar="N",
        help="updates of a run (default: the recipe's, or what the largest S needs)",
    )
    length.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="updates measured in a run, in place of --updates: arms with a small S end sooner",
    )
    add("--arms", metavar="A,B,...", help="schedules to run (default: all of the above, with S = 0, 1, 2, 4, 8)")
    add("--out", type=Path, metavar="DIR", help="folder of runs and results (default: runs/overlap-RECIPE)")
    add(
        "--report",
        action="store_true",
        help="run nothing: show an earlier result again, and write its page, table and figure into --out or its folder",
    )


def bench(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError for errors found before anything runs."""
    from rich.console import Console

    from omni_async.commands.bench.overlap import run_overlap, write_report
    from omni_async.commands.bench.plan import DEFAULT_ARMS
    from omni_async.commands.bench.result import read_overlap
    from omni_async.commands.bench.table import show

    console = Console()
    folder = options.out or Path("runs") / f"overlap-{options.recipe.stem}"
    try:
        if options.report:
            if given := [
                name for name in ("overrides", "profile", "updates", "steps", "arms") if getattr(options, name)
            ]:
                raise ConfigError(f"--report: runs nothing, so it takes no {given[0]}; leave it out")
            folder = options.out or (options.recipe if options.recipe.is_dir() else options.recipe.parent)
            overlap = read_overlap(options.recipe)
            try:
                write_report(folder, overlap)
            except (ArithmeticError, LookupError, ValueError, TypeError) as error:  # not written by a benchmark
                raise ConfigError(
                    f"{options.recipe}: its numbers make no report: {type(error).__name__}: {error}"
                ) from None
        else:
            overlap = run_overlap(
                options.recipe,
                options.overrides,
                out=folder,
                profile=options.profile,
                repeats=options.repeats,
                updates=options.updates,
                steps=options.steps,
                arms=options.arms.split(",") if options.arms is not None else DEFAULT_ARMS,
                terminal=console,
            )
    except KeyboardInterrupt:
        console.print(
            f"interrupted; the same command continues with what is missing in {folder}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise
    except OSError as error:
        raise ConfigError(f"--out: cannot write {error.filename or folder}: {error.strerror or error}") from None
    show(overlap, console)
    figure = ", overlap.png" if any(arm.measured for arm in overlap.arms) else ""
    results = "" if options.report else "overlap.json, "
    written = f"wrote {results}overlap.md, overlap.html{figure} in {folder}; open overlap.html in a browser"
    console.print(written, markup=False, highlight=False, soft_wrap=True)
    return 1 if overlap.failed else 0
