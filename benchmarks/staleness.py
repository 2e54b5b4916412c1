"""Measures what stale samples cost, and what off-policy correction regains: S x correction x seed on one recipe, reward
against samples.

S is 0, 2, 4 and 8 updates between the policy that draws a sample and the one trained on it; all samples are exactly S
updates old (after the first S updates), so what a run trains on depends neither on timing nor on how many runs share
the machine. The corrections (docs/algorithms/correction.md):

- `none`: ratio to the weights at the start of the update, as if samples were fresh
- `bypass`: ratio to the policy that drew the sample
- `decoupled_tis`: as `none`, times the importance weight of the step, truncated at 2
- `decoupled_kappa_tempered`: as `none`, times a tempered weight (ESS at least 0.7, truncated at 2, normalised), and
  steps whose exact KL exceeds `--kappa-nats` are masked

`--kappa-nats` is 2 by default. At 0.5 nats per step exact weights begin to fail, so one would choose that for a run;
but the quickstart's learning rate is high for its size, and its later steps drift by up to about 1 nat at S = 2. A mask
at 0.5 would throw these away at the smallest S and show little but its own effect; one at 2 keeps S = 2 nearly whole
and acts at S = 4 and 8.

The driver owns a pool of child processes, one per cell (`omni-async train`), and writes nothing about them: a cell is
complete if its run's own summary says so, so the same command continues after any interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.arguments import add_overrides, command_parser
from benchmarks.finished_runs import finished_run
from benchmarks.pool import Job, Pool
from benchmarks.staleness_plan import CORRECTIONS, Plan
from benchmarks.staleness_progress import Progress
from benchmarks.staleness_report import collect, write_plot, write_report
from omni_async.config import ConfigError

TRAIN = (sys.executable, "-m", "omni_async.cli", "train")
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
_HELP = """\
Train the same recipe at several staleness bounds S and with several off-policy corrections, and compare reward
against samples. All samples of a run are exactly S updates old, so the numbers do not depend on the machine's load.

  python -m benchmarks.staleness                     # 4 S x 4 corrections x 2 seeds: 32 runs, minutes of a core each
  python -m benchmarks.staleness --jobs 4 --seeds 3  # four runs at a time; complete runs are kept
  python -m benchmarks.staleness --staleness 0 8 --corrections none bypass --out runs/short --updates 50
  python -m benchmarks.staleness trainer.optimizer.lr=5e-5 --out runs/slow     # override values of the recipe
  python -m benchmarks.staleness --report            # start nothing, report on what is complete

Ctrl-C ends the runs that are going on; the same command goes on with the cells that are not complete. A cell is
complete when a run in OUT/<cell>/ is done with exactly these settings. OUT gets report.md (also printed),
results.json and reward.png; OUT/<cell>/log.txt is a run's output. Give --report the arguments of the runs it is to
report on.

Exit codes: 0 done, 1 a run failed (the others went on) or there is nothing to report, 2 wrong configuration or usage,
130 interrupted.
"""
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def main(arguments: Sequence[str] | None = None) -> int:
    plan, jobs, report_only = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        _check(plan)
        if report_only:
            return _report(plan)
        plan.out.mkdir(parents=True, exist_ok=True)
        with _alone(plan.out) as lock:
            code = asyncio.run(_train(plan, jobs, lock))
        return max(code, _report(plan))
    except ConfigError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or plan.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130


def _parse(arguments: Sequence[str]) -> tuple[Plan, int, bool]:
    cores = len(os.sched_getaffinity(0))
    parser = command_parser("staleness", _HELP)
    add_overrides(parser)
    add = parser.add_argument
    add("--recipe", type=Path, default=RECIPE, help="recipe to train (default: the quickstart)")
    add("--out", type=Path, default=Path("runs/staleness"), help="folder of runs and report (default: runs/staleness)")
    add("--seeds", type=_positive, default=2, metavar="N", help="run.seed 0 .. N-1 (default: 2)")
    add(
        "--staleness",
        type=_natural,
        nargs="+",
        default=[0, 2, 4, 8],
        metavar="S",
        help="staleness.max_updates (default: 0 2 4 8)",
    )
    add(
        "--corrections",
        choices=CORRECTIONS,
        nargs="+",
        default=CORRECTIONS,
        metavar="C",
        help=f"of {', '.join(CORRECTIONS)} (default: all)",
    )
    add(
        "--kappa-nats",
        type=float,
        default=2.0,
        metavar="X",
        help="mask of decoupled_kappa_tempered, nats per step (default: 2)",
    )
    add("--updates", type=_positive, default=100, metavar="N", help="policy updates of a run (default: 100)")
    add(
        "--jobs",
        type=_positive,
        default=cores,
        metavar="N",
        help=f"runs at a time, a core each (default: all cores, here {cores})",
    )
    add("--report", action="store_true", help="start nothing; report on what is complete")
    # An option that takes several values would swallow the overrides after it.
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    options = parser.parse_args([text for text in arguments if not _OVERRIDE.match(text)])
    if options.overrides:
        parser.error(f"{options.overrides[0]!r}: expected key.path=value")
    plan = Plan(
        recipe=options.recipe,
        out=options.out,
        updates=options.updates,
        seeds=options.seeds,
        staleness=tuple(dict.fromkeys(options.staleness)),
        corrections=tuple(dict.fromkeys(options.corrections)),
        kappa_nats=options.kappa_nats,
        extra=tuple(overrides),
    )
    return plan, options.jobs, options.report


def _check(plan: Plan) -> None:
    """Refuses here, in one line, what every child would refuse in its log."""
    from omni_async.preflight.check import preflight

    for config in [plan.config(cell) for cell in plan.cells() if cell.seed == 0]:
        preflight(config)


async def _train(plan: Plan, parallel: int, lock: int) -> int:
    cells = {cell.name: cell for cell in plan.cells()}
    todo = [cell for cell in cells.values() if finished_run(plan.folder(cell), plan.config(cell)) is None]
    failed: list[str] = []
    with Progress(plan, len(cells), len(todo), parallel) as progress:

        def ended(job: Job, code: int, seconds: float) -> None:
            cell = cells[job.name]
            run = finished_run(plan.folder(cell), plan.config(cell))
            if not progress.ended(cell, run, code, seconds, job.log):
                failed.append(job.name)

        # Each run on one core; without this, every library in it would take them all.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pool = Pool(
            parallel,
            started=lambda job: progress.started(job.name),
            ended=ended,
            interrupted=progress.interrupted,
            environment=environment,
            keep_open=[lock],
        )
        jobs = [
            Job(cell.name, (*TRAIN, str(plan.recipe), *plan.overrides(cell)), plan.folder(cell) / "log.txt")
            for cell in todo
        ]
        whole = await pool.run(jobs)
    return 130 if not whole else 1 if failed else 0


def _report(plan: Plan) -> int:
    results = collect(plan)
    if not results:
        return _say(f"nothing to report: no cell in {plan.out} is complete with these arguments", 1)
    _say(write_report(plan, results))
    try:
        written = ["report.md", "results.json", write_plot(plan, results).name]
    except ImportError:
        written = ["report.md", "results.json"]
        _say("no plot: matplotlib is not installed (pip install matplotlib, or the extra `bench`)")
    return _say(f"wrote {', '.join(written)} in {plan.out}")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[int]:
    """Holds OUT's lock, which children inherit: a driver that was killed outright may have left runs behind."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out: {out} is in use by another experiment, or by runs that one left behind; wait or choose another"
            ) from None
        yield file.fileno()


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got {text!r}")
    return int(text)


def _say(text: str, code: int = 0) -> int:
    sys.stdout.write(text + "\n")
    return code


def _refuse(message: str) -> int:
    sys.stderr.write(f"staleness: {message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
