"""Implements `omni-async tune`: its arguments, help, progress, printed output and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import add_command, live_bar, require_apart, require_writable, write_results
from omni_async.commands.simulate import add_job, profile_of
from omni_async.config import ConfigError, load
from omni_async.config.load import inputs_of
from omni_async.simulation.tune.keys import TUNED, S, with_keys

if TYPE_CHECKING:
    from omni_async.simulation.tune.search import Point

_TUNE = """\
Find, before anything runs, the best split of N devices over rollout, reward and trainer, and the sizes of the buffers.
The law of overlap ranks the splits; simulations of the real control plane in virtual time choose among them:

  omni-async tune recipes/emulated/qwen_image_lora_h800.yaml --devices 5
  omni-async tune recipes/quickstart/quickstart.yaml --profile runs/my-run/profile.json --devices 2 --plot
  omni-async tune recipe.yaml trainer.groups_per_update=64 --profile remote_judge --devices 16 --keep trainer.workers
  omni-async tune recipe.yaml --profile remote_judge --devices 16 --staleness
  omni-async train recipe.tuned.yaml

A profile contains the times of the stages: every run writes one (profile.json), some are shipped, and a recipe with
`emulation` names its own. Devices are accelerators if the recipe's placement uses any, else CPUs. A worker takes the
resources of placement.<role>. If there are fewer CPUs, the roles share them, and the numbers of workers stay as in the
recipe.

staleness.max_updates stays the recipe's: it is a cap, and samples are only as old as the pipeline requires. The output
reports a cap that is too small. --staleness searches for the smallest S within 2 % of the best throughput, as tune does
for a recipe whose schedule fixes S.

The output has the front of throughput against staleness, a reason for every chosen key, and a comparison with the
recipe and the law. The chosen keys are written as a recipe that extends yours and is no slower. Among values within
0.5 % of each other the plainer wins: smaller buffers, windows and intervals, swap: step.

A profile has times, not memory: keep the keys that your memory decides (--keep trainer.workers, with the number in the
recipe or as trainer.workers=4). Keys that can be kept: {keys}.
"""


def add_tune(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    tune = add_command(
        commands,
        "tune",
        "choose buffers and the split of N devices by simulation",
        _TUNE.format(keys=", ".join(TUNED)),
        f"{__name__}:tune_recipe",
        "measure and predict",
    )
    add_job(tune, "change the recipe first; goes into the written file too")
    add = tune.add_argument
    add("--devices", type=int, metavar="N", help="devices to deal to the roles")
    add(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that keeps the recipe's value; may be repeated",
    )
    add("--staleness", action="store_true", help="search for the smallest useful staleness.max_updates, too")
    add("--budget", type=int, default=120, metavar="N", help="most simulations (default: 120)")
    add("--seed", type=int, default=0, help="of the simulated service times (default: 0)")
    add(
        "--out", type=Path, metavar="FILE", help="recipe to write (default: RECIPE.tuned.yaml in the working directory)"
    )
    add("--plot", action="store_true", help="plot the front as a PNG next to the written recipe")
    add("--json", type=Path, metavar="FILE", help="also write all results and simulations as JSON")


def tune_recipe(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    config = load(options.recipe, options.overrides)
    profile = profile_of(config, options.profile)
    _require_usable(options)

    import msgspec

    from omni_async.simulation.tune.report import require_another_file

    out = options.out or Path(f"{options.recipe.stem}.tuned.yaml")
    require_another_file(out, options.recipe)
    plot = out.with_suffix(".png") if options.plot else None
    require_apart((("--out", out), ("--plot", plot), ("--json", options.json)))
    inputs = [*inputs_of(options.recipe, config), *([Path(options.profile)] if options.profile else [])]
    for option, path in (("--out", out), ("--plot", plot), ("--json", options.json)):
        require_writable(option, path, inputs)

    from omni_async.config.schedule import SCHEDULES
    from omni_async.simulation.result import not_measured
    from omni_async.simulation.simulate import simulate
    from omni_async.simulation.tune.report import text, write_tuned
    from omni_async.simulation.tune.tuning import tune

    searched = options.staleness or (config.schedule is not None and S in SCHEDULES[config.schedule])
    columns = ("simulation", "done", "at most", "bar", "elapsed", "{task.description}")
    with live_bar(*columns, total=options.budget) as bar:
        show = bar or (lambda summary, made: sys.stderr.writelines([f"simulated {made}: {summary}\n"]))
        tuned = tune(
            config,
            profile,
            options.devices,
            simulate,
            budget=options.budget,
            seed=options.seed,
            keep=options.keep if searched else [*options.keep, S],
            progress=lambda made, point: show(_summary(point), made),
        )
    tuned_config = with_keys(config, tuned.chosen.keys)
    notes = dict.fromkeys([*not_measured(config, profile), *not_measured(tuned_config, profile)])
    sys.stdout.writelines(f"{line}\n" for line in (*notes, text(tuned)))
    writers: dict[Path, Callable[[Path], object]] = {}
    if tuned.is_no_slower:
        writers[out] = lambda path: write_tuned(path, options.recipe, config, options.overrides, tuned)
    if plot is not None:
        from omni_async.simulation.tune.plot import picture

        writers[plot] = lambda path: picture(tuned).savefig(path, dpi=130)
    if options.json is not None:
        writers[options.json] = lambda path: path.write_bytes(
            msgspec.json.format(msgspec.json.encode(tuned), indent=2) + b"\n"
        )
    written, code = write_results(writers)
    if written:
        sys.stdout.write(f"wrote {', '.join(str(path) for path in written)}\n")
    return code


def _require_usable(options: argparse.Namespace) -> None:
    if options.devices is None:
        raise ConfigError("--devices: required, the number of devices that rollout, reward and trainer share")
    if options.devices < 1:
        raise ConfigError(f"--devices: expected at least 1, got {options.devices}")
    for key in options.keep:
        if key not in TUNED:
            raise ConfigError(f"--keep: {key} is not tuned; keys that are: {', '.join(TUNED)}")
    if options.staleness and S in options.keep:
        raise ConfigError(f"--keep: {S} is what --staleness searches for; leave one of them out")


def _summary(point: Point) -> str:
    keys = point.keys
    split = "+".join(str(keys[path]) for path in ("rollout.workers", "reward.workers", "trainer.workers"))
    return (
        f"{split} workers, S {keys['staleness.max_updates']}, groups {keys['buffer.groups']}: {point.images_per_s:.3g}"
        " samples/s"
    )
