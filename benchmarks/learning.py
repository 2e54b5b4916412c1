"""Measures what overlap is worth to learning: the synchronous and the asynchronous schedule on one recipe, reward
against wall-clock and against samples.

Both arms are `omni-async bench overlap` runs (same partition, same work per update, one run after the other in turns, a
seed per round) of which the rewards are kept, so the step times, bound fractions and their reasons lie beside the
curves, in `overlap.*`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.arguments import add_overrides, command_parser, write_json
from benchmarks.learning_plot import Curve, draw
from omni_async.bench.overlap import run_overlap
from omni_async.bench.result import Overlap
from omni_async.config import ConfigError, load
from omni_async.tracking.files import read_lines, write_atomic

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
_HELP = """\
Train a recipe synchronously and asynchronously, in turns, and compare reward against wall-clock and against samples.

  python -m benchmarks.learning                  # quickstart, 3 seeds, sync and S = 2: six runs of some minutes
  python -m benchmarks.learning --arms sync async:1 async:4 --repeats 5 --updates 60
  python -m benchmarks.learning --out runs/slow trainer.optimizer.lr=5e-5      # override values of the recipe

What is complete is kept: the same command goes on after Ctrl-C. OUT gets learning.md (also printed), learning.json,
learning.png, and overlap.md, overlap.json, overlap.png with the step times of the same runs.

Exit codes: 0 done, 1 a run failed, 2 wrong configuration or usage, 130 interrupted.
"""


def read_curve(run: Path, arm: str, seed: int) -> Curve:
    """Reads a run folder's metrics.jsonl. A validated version is plotted at the moment its update was done, when it
    could be used."""
    lines = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
    updates = [line for line in lines if "finished" in line]
    start = updates[0]["finished"] - updates[0]["update_s"]
    done = {0: (0.0, 0)} | {line["update"]: (line["finished"] - start, line["images"]) for line in updates}
    rounds = sorted((line["update"], line["validation/reward"]) for line in lines if "validation/reward" in line)
    return Curve(
        arm=arm,
        seed=seed,
        seconds=[done[line["update"]][0] for line in updates],
        images=[line["images"] for line in updates],
        rewards=[line["reward"] for line in updates],
        validation=[(*done[version], reward) for version, reward in rounds],
    )


def curves(overlap: Overlap, out: Path) -> list[Curve]:
    """Reads the curve of every run that was measured."""
    return [
        read_curve(out / run.folder, arm.name, arm.config["run"]["seed"] + run.round)
        for arm in overlap.arms
        for run in arm.runs
        if run.folder is not None and run.measured is not None and arm.config is not None
    ]


def common_reward(found: Sequence[Curve]) -> float | None:
    """Returns the highest validation reward that every run reached."""
    best = [max(value for _, _, value in curve.validation) for curve in found if curve.validation]
    return min(best) if len(best) == len(found) and best else None


def table(found: Sequence[Curve]) -> str:
    target = common_reward(found)
    head = f"seconds to validation {target:.3f}" if target is not None else "seconds to a common validation reward"
    lines = [
        f"| arm | seeds | seconds of training | validation, first -> last | {head} |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(curve.arm for curve in found):
        own = [curve for curve in found if curve.arm == arm]
        ends = [f"{c.validation[0][2]:.3f} -> {c.validation[-1][2]:.3f}" for c in own if c.validation]
        reached = [seconds for c in own if target is not None and (seconds := c.seconds_to(target)) is not None]
        trained = ", ".join(f"{c.seconds[-1]:.0f}" for c in own)
        shown = f"{statistics.median(reached):.0f} ({', '.join(f'{s:.0f}' for s in reached)})" if reached else "–"
        lines.append(f"| {arm} | {len(own)} | {trained} | {', '.join(ends) or '–'} | {shown} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        overlap = run_overlap(
            options.recipe,
            [*_validation(options.recipe), *options.overrides],
            out=options.out,
            repeats=options.repeats,
            updates=options.updates,
            arms=options.arms,
        )
        found = curves(overlap, options.out)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"learning: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    if not found:
        sys.stderr.write("learning: no run was complete\n")
        return 1
    text = table(found)
    write_atomic(options.out / "learning.md", text.encode())
    write_json(options.out / "learning.json", found)
    draw(found, options.out / "learning.png")
    sys.stdout.write(f"\n{text}\nwrote learning.md, learning.json and learning.png in {options.out}\n")
    return 1 if overlap.failed else 0


def _validation(recipe: Path) -> list[str]:
    """Returns the recipe's own validation, which `bench overlap` leaves out otherwise."""
    validation = load(recipe).validation
    if validation is None:
        return []
    content: dict[str, Any] = msgspec.to_builtins(validation)
    return [f"validation={json.dumps(content)}"]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("learning", _HELP)
    add_overrides(parser)
    add = parser.add_argument
    add("--recipe", type=Path, default=RECIPE, help="recipe to train (default: the quickstart)")
    add(
        "--out",
        type=Path,
        default=Path("runs/bench/learning"),
        help="folder of runs and report (default: runs/bench/learning)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="rounds, a seed each (default: 3)")
    add("--updates", type=int, default=60, metavar="N", help="policy updates of a run (default: 60)")
    add(
        "--arms",
        nargs="+",
        default=["sync", "async:2"],
        metavar="ARM",
        help="as in omni-async bench overlap (default: sync async:2)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
