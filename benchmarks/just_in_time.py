"""Measures what a policy learns per second: synchronous, admitted just in time, and with every slot taken.

Real runs through Ray. The arms take turns seed by seed, so a busy machine slows each of them alike.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.arguments import append_row, command_parser
from benchmarks.lanes import Lanes, draw_lanes, lanes_of
from omni_async.config.writing import replacing

_HELP = """\
Train the quickstart once per arm and seed, and follow its validation reward.

  python -m benchmarks.just_in_time                       # 15 runs of about 2 minutes on two cores
  python -m benchmarks.just_in_time --job quickstart      # the quickstart as it is, with vLLM-Omni
  python -m benchmarks.just_in_time --table --picture     # train nothing; print CSV's table, draw its pictures

Every finished run appends a row to CSV; the same command continues with the runs that have none. Exit codes: 0 done,
1 a run failed, 2 wrong usage, 130 interrupted.

Pictures: just_in_time.png has the curves of all arms. sync_async.png, of README.md, has the curves of two arms, and
lanes of a job on emulated devices in virtual time, which take some seconds of one core.
"""
_ROOT = Path(__file__).parents[1]
_RECIPE = _ROOT / "recipes" / "quickstart" / "quickstart.yaml"
_THRESHOLD = 0.75  # of the validation reward
_EVERY = 10  # updates between validation rounds
JOBS = {
    # Training is the slowest stage: engines that take every slot run S updates ahead.
    "trainer_bound": (
        "rollout.engine=diffusers",
        "trainer.micro_batch_size=2",
        "staleness.max_updates=8",
        "buffer.groups=36",
        "buffer.trajectories=432",
        "algorithm.correction.mode=bypass",
    ),
    "quickstart": (),
}
ARMS = {
    "synchronous": "staleness.max_updates=0",
    "just_in_time": "staleness.reserve=auto",
    "eager": "staleness.reserve=all",
}
_COLOURS = {"synchronous": "#0072B2", "just_in_time": "#009E73", "eager": "#D55E00"}  # Okabe and Ito


class Cell(NamedTuple):
    job: str
    arm: str
    seed: int
    updates: int


class Row(NamedTuple):
    """A finished run.

    `seconds` after loading. `staleness`: mean over groups. `starved_s`: waits of the trainer for withheld groups.
    `versions`: the policies that were validated. For each of them, `at_s` has the seconds after loading at which it
    existed, and `rewards` its validation reward."""

    job: str
    arm: str
    seed: int
    updates: int
    seconds: float
    staleness: float
    starved_s: float
    versions: tuple[int, ...]
    at_s: tuple[float, ...]
    rewards: tuple[float, ...]

    @property
    def cell(self) -> Cell:
        return Cell(self.job, self.arm, self.seed, self.updates)

    @property
    def reached_s(self) -> float | None:
        """Return the seconds to the threshold, interpolated between validated policies; None if never reached."""
        points = [*zip(self.at_s, self.rewards, strict=True)]
        for (before_s, before), (after_s, after) in pairwise(points):
            if before < _THRESHOLD <= after:
                return before_s + (after_s - before_s) * (_THRESHOLD - before) / (after - before)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.updates < _EVERY or options.seeds < 1:
        sys.stderr.write(f"just_in_time: --updates: expected at least {_EVERY}; --seeds: at least 1\n")
        return 2
    cells = [Cell(options.job, arm, seed, options.updates) for seed in range(options.seeds) for arm in options.arms]
    done = {row.cell for row in read_rows(options.csv)}
    shows = options.table or options.picture is not None
    try:
        for cell in cells if not shows else ():
            if cell not in done:
                row = _train(cell)
                append_row(options.csv, _written(row))
                _print(msgspec.json.encode(row._asdict()).decode())
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        sys.stderr.write(f"just_in_time: {error}\n")
        return 1
    rows = [row for row in read_rows(options.csv) if (row.job, row.updates) == (options.job, options.updates)]
    for line in table(rows):
        _print(line)
    if options.picture is not None:
        pictures = {"just_in_time.png": picture(rows), "sync_async.png": first_picture(rows, *lanes_of())}
        options.picture.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures.items():
            with replacing(options.picture / name) as unfinished:
                figure.savefig(unfinished, dpi=110)
            _print(f"wrote {options.picture / name}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("just_in_time", _HELP)
    add = parser.add_argument
    add("--job", choices=JOBS, default="trainer_bound", help="what is trained (default: trainer_bound)")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="ways of admission (default: all)")
    add("--seeds", type=int, default=5, metavar="N", help="run.seed 0 to N - 1 (default: 5)")
    add("--updates", type=int, default=60, metavar="N", help="policy updates of a run (default: 60)")
    add("--csv", type=Path, default=Path(__file__).with_suffix(".csv"), help="file of finished runs")
    add("--table", action="store_true", help="train nothing, print the table of CSV")
    add(
        "--picture",
        type=Path,
        nargs="?",
        const=_ROOT / "docs",
        metavar="FOLDER",
        help="train nothing, write just_in_time.png and sync_async.png (default: into docs)",
    )
    return parser


def _train(cell: Cell) -> Row:
    """Run a cell. RuntimeError with its output if it fails; KeyboardInterrupt once the run has ended its processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "omni_async.cli", "train", str(_RECIPE), *settings(cell), f"run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # In its own session, so that Ctrl-C reaches it once: through this process.
        with subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            try:
                shown, _ = run.communicate()
            except KeyboardInterrupt:
                run.send_signal(signal.SIGINT)
                run.communicate()
                raise
        if run.returncode:
            raise RuntimeError(f"{cell} ended with code {run.returncode}:\n{shown[-4000:]}")
        return measured(cell, next(Path(folder).glob("*/metrics.jsonl")))


def settings(cell: Cell) -> list[str]:
    """Return the overrides of the quickstart's recipe that make a cell."""
    return [
        *JOBS[cell.job],
        ARMS[cell.arm],
        f"run.seed={cell.seed}",
        f"trainer.updates={cell.updates}",
        f"validation.every={_EVERY}",
        "tracking.mlflow.enabled=false",
    ]


def measured(cell: Cell, metrics: Path) -> Row:
    """Return the row of a finished run, from its metrics.jsonl."""
    lines = [msgspec.json.decode(line) for line in metrics.read_text().splitlines()]
    updates = {line["update"]: line for line in lines if "loss" in line}
    rounds = sorted((line for line in lines if "validation/reward" in line), key=lambda line: line["update"])
    versions = tuple(line["update"] for line in rounds)
    return Row(
        *cell,
        round(updates[cell.updates]["wall_s"], 1),
        round(fmean(line["staleness/mean"] for line in updates.values()), 3),
        round(sum(line["admission/starved_s"] for line in updates.values()), 2),
        versions,
        tuple(round(updates[version]["wall_s"], 1) if version else 0.0 for version in versions),
        tuple(round(line["validation/reward"], 4) for line in rounds),
    )


def read_rows(path: Path) -> list[Row]:
    """Return the finished runs of a file, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Row(
                r["job"],
                r["arm"],
                int(r["seed"]),
                int(r["updates"]),
                float(r["seconds"]),
                float(r["staleness"]),
                float(r["starved_s"]),
                tuple(map(int, r["versions"].split())),
                tuple(map(float, r["at_s"].split())),
                tuple(map(float, r["rewards"].split())),
            )
            for r in csv.DictReader(file)
        ]


def _written(row: Row) -> NamedTuple:
    """Return a row whose lists are numbers separated by spaces."""
    lists = {name: " ".join(map(str, value)) for name, value in row._asdict().items() if isinstance(value, tuple)}
    return row._replace(**lists)  # type: ignore[arg-type]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table, a line per arm with its seeds next to each other, and a ratio of times."""
    yield f"| arm | validation reward at the end | mean | seconds after loading | seconds to {_THRESHOLD} | staleness |"
    yield "|---|---|---:|---|---|---:|"
    for arm in ARMS:
        own = sorted((row for row in rows if row.arm == arm), key=lambda row: row.seed)
        if not own:
            continue
        rewards = [row.rewards[-1] for row in own]
        reached = [row.reached_s for row in own]
        shown = ", ".join("never" if at is None else f"{at:.0f}" for at in reached)
        if (middle := median(float("inf") if at is None else at for at in reached)) < float("inf"):
            shown += f": median {middle:.0f}"
        yield (
            f"| {arm.replace('_', ' ')} | {', '.join(f'{reward:.3f}' for reward in rewards)} | {fmean(rewards):.3f}"
            f" | {', '.join(f'{row.seconds:.0f}' for row in own)} | {shown}"
            f" | {fmean(row.staleness for row in own):.2f} |"
        )
    if ratios := time_ratios(rows):
        yield ""
        yield (
            f"Just in time takes {median(ratios):.2f} of the synchronous loop's seconds (median of {len(ratios)} seeds;"
            f" {min(ratios):.2f} to {max(ratios):.2f})."
        )


def time_ratios(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of admission just in time over the synchronous loop's, for every seed that has both."""
    seconds = {(row.arm, row.seed): row.seconds for row in rows}
    seeds = sorted(seed for arm, seed in seconds if arm == "just_in_time" and ("synchronous", seed) in seconds)
    return [seconds["just_in_time", seed] / seconds["synchronous", seed] for seed in seeds]


def picture(rows: Sequence[Row]) -> Figure:
    """Plot validation reward against seconds: a thin line per run, and a thick one of the means over an arm's seeds."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    labels = {
        arm: f"{arm.replace('_', ' ')}: samples {fmean(own):.1f} updates old"
        for arm in ARMS
        if (own := [row.staleness for row in rows if row.arm == arm])
    }
    _draw_curves(figure.subplots(), rows, labels)
    return figure


def first_picture(rows: Sequence[Row], in_step: Lanes, overlapped: Lanes) -> Figure:
    """Plot the curves of the synchronous loop and of admission just in time; next to them, lanes of who works when."""
    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    curves, lanes = figure.subplots(1, 2, width_ratios=(1.0, 1.35))
    _draw_curves(curves, rows, {"synchronous": "synchronous", "just_in_time": "asynchronous, just in time"})
    curves.set_title("quickstart, two CPU cores, 5 seeds", fontsize=10)
    draw_lanes(lanes, in_step, overlapped, (_COLOURS["synchronous"], _COLOURS["just_in_time"]))
    lanes.set_title("Qwen-Image with LoRA, 5 emulated H800 GPUs: who works when", fontsize=10)
    return figure


def _draw_curves(axes: Axes, rows: Sequence[Row], labels: Mapping[str, str]) -> None:
    for arm, label in labels.items():
        own, colour = [row for row in rows if row.arm == arm], _COLOURS[arm]
        for row in own:
            axes.plot(row.at_s, row.rewards, color=colour, alpha=0.25, linewidth=0.8)
        if own:
            seconds = [fmean(at) for at in zip(*(row.at_s for row in own), strict=True)]
            rewards = [fmean(found) for found in zip(*(row.rewards for row in own), strict=True)]
            axes.plot(seconds, rewards, color=colour, marker="o", linewidth=2, label=label)
    axes.set_xlabel("seconds after loading")
    axes.set_ylabel("validation reward")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
