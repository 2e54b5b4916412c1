"""Kills a whole job with kill -9 at random moments, resumes it each time, and checks the result.

Does the ledger still account for every group once, and what did it cost?
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import command_parser
from omni_async.config import ConfigError
from omni_async.records.write.files import read_lines
from tests.support.killed_job import Job, problems

RECIPE = Path(__file__).parents[1] / "recipes" / "emulated" / "qwen_image_lora_h800.yaml"
_HELP = """\
Train a recipe, kill all of its processes at random moments, and continue with checkpoint.resume=auto, until it is done.

  python -m benchmarks.kill_everything                # emulated, one process, 20 kills: some minutes
  python -m benchmarks.kill_everything --kills 5 --within 60 --recipe recipes/quickstart/quickstart.yaml \\
      trainer.updates=40

Printed is what was lost, and whether every admitted group ended in exactly one line of the ledger and every update
was made of its groups once.

Exit codes: 0 the ledger is right, 1 it is not or the job failed, 2 wrong usage.
"""
_QUICK = ("run.runtime=inprocess", "emulation.time_scale=0.001", "trainer.updates=300", "checkpoint.every=10")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("kill_everything", _HELP)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--recipe", type=Path, help="default: an emulated one, quick and in one process")
    parser.add_argument("--kills", type=int, default=20, help="(default: 20)")
    parser.add_argument(
        "--within",
        type=float,
        default=3.0,
        metavar="S",
        help="kill up to S seconds after an attempt's first update (default: 3)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill-everything"))
    options = parser.parse_args(arguments)
    overrides = [*(_QUICK if options.recipe is None else ()), *options.overrides, f"run.dir={options.out.absolute()}"]
    job = Job(options.recipe or RECIPE, overrides)
    try:
        if any(job.folder.glob("*/")):
            parser.error(f"--out: {options.out} holds runs already; give another folder")
    except ConfigError as error:
        parser.error(str(error))
    dice, kills, code = random.Random(options.seed), 0, None
    while code is None:
        code = job.attempt(dice.uniform(0, options.within) if kills < options.kills else None)
        kills += code is None
        sys.stdout.write(
            f"attempt {job.attempts}: {'killed' if code is None else f'ended with exit code {code}'}: {job.said[-1]}\n"
        )
    if code != 0:
        sys.stderr.write("\n".join(job.said[-5:]) + "\n")
        return 1
    wrong = problems(job)
    void = len(read_lines(job.run / "ledger.jsonl.void"))
    redone = sum(b'"finished"' in line for line in read_lines(job.run / "metrics.jsonl.void"))
    sys.stdout.write(
        f"{kills} kills, {job.config.trainer.updates} updates, {len(read_lines(job.run / 'ledger.jsonl'))} groups, each"
        f" with one line of the ledger; {redone} updates and {void} groups' ends were void and done again;"
        f" {job.seconds:.0f} s in {job.attempts} attempts\n"
    )
    for line in wrong:
        sys.stderr.write(f"WRONG: {line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
