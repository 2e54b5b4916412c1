"""Kills a part of a running job every few seconds, and checks the result.

Does the job finish its updates, does its ledger account for every group once, and what did each fault cost?
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import command_parser
from omni_async.config import ConfigError
from omni_async.records.write.attempts import read_faults
from omni_async.records.write.summary import read_summary
from omni_async.runtime.driver.control_socket import ControlError
from tests.support.killed_job import Job, end_job, problems

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
_HELP = """\
Train a recipe and, once it has made its first updates, kill one of its processes every few seconds: engines and
reward workers at random, the trainer as often as asked for. A kill is SIGKILL, or SIGSTOP for every fourth, which the
job has to notice by itself. An undisturbed run comes first, to compare.

  python -m benchmarks.chaos                     # the quickstart, 5 minutes of a kill every 15 s
  python -m benchmarks.chaos --every 5 --seconds 60 --recipe recipes/emulated/qwen_image_lora_h800.yaml \\
      emulation.time_scale=0.003 trainer.updates=200

Exit codes: 0 the job survived and its ledger is right, 1 it did not or it is not, 2 wrong usage.
"""
_OVERRIDES = ("run.restarts=1000", "run.health_timeout_s=10")


@dataclass
class Kill:
    role: str
    part: str
    how: str
    after: float  # seconds since the first update


@dataclass
class Run:
    job: Job
    kills: list[Kill] = field(default_factory=list)
    code: int | None = None

    def execute(self, plan: Sequence[tuple[float, str, str]]) -> None:
        """Run the job to its end. `plan`: (seconds after the first update, role, SIGKILL or SIGSTOP) of each kill."""
        with self._begun() as process:
            begun = time.monotonic()
            for number, (after, role, how) in enumerate(plan, 1):
                while (left := begun + after - time.monotonic()) > 0 and process.poll() is None:
                    time.sleep(min(left, 0.2))
                part = self._kill(role, how, begun)
                _log(
                    f"{after:5.0f} s, {number}/{len(plan)}: "
                    + (f"{how} for {part}" if part else f"no {role} is at work")
                )
            self.code = process.wait()

    @contextmanager
    def _begun(self) -> Iterator[subprocess.Popen[str]]:
        """Start the job and yields its process after the first update."""
        log = self.job.folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        _log(f"{self.job.folder.name} run: see {log}")
        with log.open("w") as out:
            process = self.job.start(out)
            try:
                while process.poll() is None and "update " not in log.read_text():
                    time.sleep(0.2)
                yield process
            finally:
                end_job(process)

    def _kill(self, role: str, how: str, begun: float) -> str | None:
        """Kill one running worker of the role. Return its name; None if all of them are being replaced."""
        try:
            parts = self.job.parts()
        except (ControlError, ValueError):
            return None  # it starts again, or has ended
        chosen = random.choice([name for name in parts if name.startswith(role)] or [""])
        if chosen:
            with contextlib.suppress(ProcessLookupError):  # it is gone, and the run has not noticed yet
                os.kill(parts[chosen]["pid"], getattr(signal, how))
                self.kills.append(Kill(role, chosen, how, time.monotonic() - begun))
        return chosen or None

    @property
    def seconds(self) -> float:
        return read_summary(self.job.run / "summary.json").wall_s


def _log(text: str) -> None:
    """Write progress to stderr; stdout contains only the report."""
    sys.stderr.write(f"{text}\n")


def plan(every: float, seconds: float, trainers: int, dice: random.Random) -> list[tuple[float, str, str]]:
    """Return (seconds, role, signal) of each kill. The trainer's kills are spread out, none of them first."""
    times = [every * (i + 1) for i in range(int(seconds // every))]
    trainer_kills = {(k + 1) * len(times) // (trainers + 1) for k in range(trainers)}
    kinds = [("trainer" if i in trainer_kills else dice.choice(("rollout", "reward"))) for i in range(len(times))]
    return [
        (at, kind, "SIGSTOP" if i % 4 == 3 else "SIGKILL")
        for i, (at, kind) in enumerate(zip(times, kinds, strict=True))
    ]


def report(calm: Run | None, run: Run) -> list[str]:
    faults, ledger = read_faults(run.job.run / "faults.jsonl"), run.job.lines("ledger.jsonl")
    lines = [
        "| part | kills (of them SIGSTOP) | came back | seconds until the part was at work again, median (longest) |",
        "|---|---|---|---|",
    ]
    for role in ("rollout", "reward", "trainer"):
        kills = [kill for kill in run.kills if kill.role == role]
        mended = [fault.seconds for fault in faults if fault.part.startswith(role)]
        took = f"{statistics.median(mended):.1f} ({max(mended):.1f})" if mended else ""
        lines.append(
            f"| {role} | {len(kills)} ({sum(kill.how == 'SIGSTOP' for kill in kills)}) | {len(mended)} | {took} |"
        )
    again = sum(line["attempts"] > 1 for line in ledger)
    lines += [
        "",
        (
            f"- groups admitted, each with exactly one line: {len(ledger)}; trained:"
            f" {sum(line['event'] == 'trained' for line in ledger)}"
        ),
        f"- groups of which a sample was generated again: {again}",
        (
            "- ends of groups that became void with an attempt of the trainer and were recorded again:"
            f" {len(run.job.lines('ledger.jsonl.void'))}"
        ),
    ]
    if calm is not None:
        lost = run.seconds - calm.seconds
        each = f", {lost / len(run.kills):.1f} s per fault" if run.kills else ""
        lines.append(
            f"- seconds from the first sample to the end: {run.seconds:.0f}, undisturbed {calm.seconds:.0f}{each}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("chaos", _HELP)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills (default 15)")
    parser.add_argument("--seconds", type=float, default=300.0, help="for how long parts are killed (default 300)")
    parser.add_argument("--trainers", type=int, default=2, help="how many of the kills are the trainer's (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-baseline", action="store_true", help="do not run the job undisturbed first")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/chaos"),
        help="where the runs go (default runs/chaos); an undisturbed run that is there is not repeated",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", default=[], help="override a value of the recipe"
    )
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    if (options.out / "disturbed").exists():
        parser.error(f"--out: {options.out / 'disturbed'} exists; name another folder")
    usual = ["rollout.workers=2", "checkpoint.every=10"] if options.recipe == RECIPE else []

    def job(name: str) -> Run:
        return Run(Job(options.recipe, [*usual, *_OVERRIDES, *options.overrides, f"run.dir={options.out / name}"]))

    calm = None if options.no_baseline else job("calm")
    run = job("disturbed")
    try:
        if calm is not None and not any(calm.job.folder.glob("*/summary.json")):
            calm.execute([])
        run.execute(plan(options.every, options.seconds, options.trainers, random.Random(options.seed)))
        found = problems(run.job)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ValueError:
        sys.stderr.write(f"the job did not start: {options.out}/*.log says why\n")
        return 1
    sys.stdout.write("\n".join([*report(calm, run), *found, f"exit code {run.code}"]) + "\n")
    return 0 if run.code == 0 and not found else 1


if __name__ == "__main__":
    sys.exit(main())
