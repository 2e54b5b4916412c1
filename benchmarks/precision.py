"""Measures the cost of a bfloat16 engine's rounding, by the reference policy of importance ratios.

The quickstart runs in one process, with a float32 trainer and an engine whose bfloat16 error is amplified
(`precision_engine`), so that its log-ratios have the nats of a published recipe: its transition, its clip range in
nats, its staleness. Samples are exactly S updates old, so a cell depends neither on timing nor on the machine's load.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.arguments import append_row, command_parser

_HELP = """\
Train the quickstart with a bfloat16 engine whose rounding error is amplified, once per correction and seed.

  python -m benchmarks.precision                                      # 12 cells of about 2 minutes on one core
  python -m benchmarks.precision --factor 8 --corrections bypass auto
  python -m benchmarks.precision --table                              # train nothing, print the table

Every finished cell appends a row to CSV; the same command continues with the cells that have none. Exit codes: 0 done,
1 a run failed, 2 wrong usage, 130 interrupted.
"""
_ROOT = Path(__file__).parents[1]
_RECIPE = _ROOT / "recipes" / "quickstart" / "quickstart.yaml"
_LAST = 10  # updates whose mean reward is the result
CORRECTIONS = {
    "bypass": "{mode: bypass}",
    "none": "{mode: none}",
    "decoupled": "{mode: decoupled, weights: tempered, ess_target: 0.7, cap: 2.0}",
    "auto": "{mode: auto}",
}
# recipes/qwen_image_ocr/flow_grpo_lora.yaml: 1e-5 per element are 0.66 nats of 65 536 elements.
_SETTINGS = (
    "run.runtime=inprocess",
    "rollout.engine=diffusers",
    "rollout.sde={kind: flow, noise_level: 1.2, window: {size: 2, range: [0, 5]}}",
    "staleness={max_updates: 2, exact: true}",
    "trainer.max_mismatch=null",
    "validation=null",
    "tracking.mlflow.enabled=false",
)
_CLIP_NATS = 0.66


class Cell(NamedTuple):
    """A run: the factor of the engine's error, the correction by name, the seed and the number of updates."""

    factor: float
    correction: str
    seed: int
    updates: int


class Row(NamedTuple):
    """A finished cell. Before any update: mean and std of L in nats, and the share of rows that the loss clips.

    `reward_first` is the mean of the first update, `reward` that of the last 10, `cpu_s` the processor seconds."""

    factor: float
    correction: str
    seed: int
    updates: int
    mean_nats: float
    std_nats: float
    clipped: float
    reward_first: float
    reward: float
    cpu_s: float

    @property
    def cell(self) -> Cell:
        return Cell(self.factor, self.correction, self.seed, self.updates)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.child:
        return _train_here(options.factor, options.child)
    if options.updates < 1 or options.seeds < 1:
        sys.stderr.write("precision: --updates and --seeds: expected at least 1\n")
        return 2
    seeds = range(options.seeds)
    cells = [Cell(options.factor, name, seed, options.updates) for seed in seeds for name in options.corrections]
    done = {row.cell for row in read_rows(options.csv)}
    try:
        for cell in cells if not options.table else ():
            if cell not in done:
                row = _train(cell)
                append_row(options.csv, row)
                _print(" ".join(f"{name} {value}" for name, value in row._asdict().items()))
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        sys.stderr.write(f"precision: {error}\n")
        return 1
    for line in table(read_rows(options.csv)):
        _print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("precision", _HELP)
    add = parser.add_argument
    add("--factor", type=float, default=32.0, metavar="X", help="factor of the engine's rounding error (default: 32)")
    add("--corrections", nargs="+", choices=CORRECTIONS, default=[*CORRECTIONS], help="corrections (default: all)")
    add("--seeds", type=int, default=3, metavar="N", help="run.seed 0 to N - 1 (default: 3)")
    add("--updates", type=int, default=60, metavar="N", help="policy updates of a run (default: 60)")
    add("--csv", type=Path, default=Path(__file__).with_suffix(".csv"), help="file of finished cells")
    add("--table", action="store_true", help="train nothing, print the table of CSV")
    add("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _train(cell: Cell) -> Row:
    """Run a cell in a separate process. RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        correction = CORRECTIONS[cell.correction]
        command = [sys.executable, "-m", "benchmarks.precision", "--factor", str(cell.factor), "--child"]
        command += ["train", str(_RECIPE), *_SETTINGS, f"run.dir={folder}", f"run.seed={cell.seed}"]
        command += [f"algorithm={{clip_range_nats: {_CLIP_NATS}, correction: {correction}}}"]
        command += [f"trainer.updates={cell.updates}", f"checkpoint.every={cell.updates}"]
        before = os.times()
        ended = subprocess.run(
            command, cwd=_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        now = os.times()
        if ended.returncode:
            shown = ended.stdout[-2000:] + ended.stderr[-2000:]
            raise RuntimeError(f"{cell} ended with code {ended.returncode}:\n{shown}")
        lines = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    found = [msgspec.json.decode(line) for line in lines]
    updates = [line for line in found if "loss" in line]
    rewards = [line["reward"] for line in updates]
    first, last = updates[0], rewards[-_LAST:]
    return Row(
        *cell,
        round(first["log_ratio_nats/mean"], 3),
        round(math.sqrt(first["log_ratio_nats/variance"]), 3),
        round(first["clip_fraction"], 3),
        round(rewards[0], 4),
        round(sum(last) / len(last), 4),
        round(now.children_user + now.children_system - before.children_user - before.children_system, 1),
    )


def _train_here(factor: float, command: Sequence[str]) -> int:
    """Run a command of `omni-async` in this process, with amplified engines in place of the diffusers ones."""
    from omni_async import compat

    compat.tolerate_cuda_builds_beside_cpu_torch()
    from benchmarks.precision_engine import amplified_engine
    from omni_async import cli
    from omni_async.rollout import diffusers_engine

    diffusers_engine.DiffusersEngine = amplified_engine(factor)  # type: ignore[misc]
    return cli.main([*command])


def read_rows(path: Path) -> list[Row]:
    """Return the finished cells of a file, none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Row(float(r["factor"]), r["correction"], int(r["seed"]), int(r["updates"]), *map(float, [*r.values()][4:]))
            for r in csv.DictReader(file)
        ]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table: a line per factor and correction, with the seeds next to each other."""
    yield "| factor | correction | L before any update, nats | rows clipped before any update | reward at the end |"
    yield "|---|---|---|---|---|"
    for factor, correction in dict.fromkeys((row.factor, row.correction) for row in sorted(rows, key=_order)):
        own = sorted((r for r in rows if (r.factor, r.correction) == (factor, correction)), key=lambda r: r.seed)
        nats = ", ".join(f"{row.mean_nats:.2f} ± {row.std_nats:.2f}" for row in own)
        clipped = ", ".join(f"{row.clipped:.0%}" for row in own)
        rewards = ", ".join(f"{row.reward:.3f}" for row in own)
        mean = sum(row.reward for row in own) / len(own)
        yield f"| {factor:g} | `{correction}` | {nats} | {clipped} | {rewards}: {mean:.3f} |"


def _order(row: Row) -> tuple[float, int]:
    return row.factor, [*CORRECTIONS].index(row.correction)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
