"""Kills a whole job with kill -9 at random moments, resumes it each time, and checks the result.

Does the ledger still account for every group once, and what did it cost?
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.arguments import command_parser
from omni_async.checkpoint.folders import newest_first
from omni_async.checkpoint.state import read_state
from omni_async.config import Config, ConfigError, load
from omni_async.records.write.files import read_lines
from omni_async.records.write.ledger_file import LedgerDamaged, require_prefix
from omni_async.runtime.driver.control_socket import Request, ask

RECIPE = Path(__file__).parents[1] / "recipes" / "emulated" / "qwen_image_lora_h800.yaml"
_HELP = """\
Train a recipe, kill all of its processes at random moments, and go on with checkpoint.resume=auto, until it is done.

  python -m benchmarks.kill_everything                # emulated, one process, 20 kills: some minutes
  python -m benchmarks.kill_everything --kills 5 --within 60 --recipe recipes/quickstart/quickstart.yaml \\
      trainer.updates=40

Printed is what was lost, and whether every admitted group ended in exactly one line of the ledger and every update
was made of its groups once.

Exit codes: 0 the ledger is right, 1 it is not or the job failed, 2 wrong usage.
"""
_QUICK = ("run.runtime=inprocess", "emulation.time_scale=0.001", "trainer.updates=300", "checkpoint.every=10")


@dataclass
class Job:
    """The command, run repeatedly. `overrides` set a separate run.dir."""

    recipe: Path
    overrides: Sequence[str]
    attempts: int = 0
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)

    def attempt(self, until: float | None) -> int | None:
        """Make one attempt: run to the end, or kill the job `until` seconds after its first update.

        Returns its exit code; None if it was killed."""
        self.attempts += 1
        began = time.monotonic()
        job = self.start(subprocess.PIPE, "checkpoint.resume=auto")
        assert job.stdout is not None
        try:
            for line in job.stdout:
                self.said.append(line.rstrip())
                if until is not None and line.startswith("update ") and (self.attempts > 1 or self._has_checkpoint()):
                    time.sleep(until)
                    if job.poll() is None:
                        return None
                    break
            job.stdout.read()
            return job.wait()
        finally:
            end_job(job)
            self.seconds += time.monotonic() - began

    def start(self, out: int | IO[str], *more: str) -> subprocess.Popen[str]:
        """Start the command with `more` overrides; its output is written to `out`."""
        command = [sys.executable, "-m", "omni_async.cli", "train", str(self.recipe), *self.overrides, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)

    def _has_checkpoint(self) -> bool:
        return any(self.folder.glob("*/checkpoints/update-*"))

    @property
    def config(self) -> Config:
        return load(self.recipe, [*self.overrides])

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)

    @property
    def run(self) -> Path:
        (run,) = self.folder.glob(f"{self.config.run.name}-*/")
        return run

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return the processes of the job while it runs. Raises ControlError if it does not answer."""
        status: dict[str, dict[str, Any]] = ask(self.run / "control.sock", Request(), timeout_s=30)["parts"]
        return status

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Read a file of JSON lines. Raises ValueError, with the line's number, if a line is not JSON."""
        found = []
        for number, line in enumerate(read_lines(self.run / name), 1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}") from None
        return found


def end_job(job: subprocess.Popen[str]) -> None:
    """Kill the job and everything it started, at once."""
    try:
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    job.wait()


def problems(job: Job, updates: int | None = None) -> list[str]:
    """List the problems in the files of a finished job.

    Empty if every group ended once and every update was made once. `updates`: the expected number of updates, in place
    of the recipe's."""
    try:
        config, ledger, metrics = job.config, job.lines("ledger.jsonl"), job.lines("metrics.jsonl")
    except ValueError as error:
        return [str(error)]
    found = []
    try:
        require_prefix(job.run / "ledger.jsonl", read_state(next(newest_first(job.run / "checkpoints"))).control.ledger)
    except LedgerDamaged as error:
        found.append(str(error))
    groups = sorted(line["group"] for line in ledger)
    if groups != [*range(len(groups))]:
        found.append(
            f"{len(groups)} lines for groups {groups[0]} to {groups[-1]}, {len(set(groups))} of them different"
        )
    trained = Counter(line["trained_version"] for line in ledger if line["event"] == "trained")
    last = config.trainer.updates if updates is None else updates
    wanted = dict.fromkeys(range(1, last + 1), config.trainer.groups_per_update)
    if trained != wanted:
        wrong = sorted(version for version in wanted.keys() | trained.keys() if trained[version] != wanted.get(version))
        found.append(f"updates {wrong[:10]} were not made of {config.trainer.groups_per_update} groups")
    made = [line["update"] for line in metrics if "finished" in line]
    if made != [*wanted]:
        found.append(f"metrics have {len(made)} updates, {len(set(map(str, made)))} of them different")
    if stale := [
        line for line in ledger if line["event"] == "trained" and line["staleness"] > config.staleness.max_updates
    ]:
        found.append(f"{len(stale)} groups were trained beyond the staleness budget")
    return found


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
