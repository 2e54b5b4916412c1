"""Runs a recipe as the command line does, kills its processes, and checks the files of the finished run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from omni_async.checkpoint.folders import newest_first
from omni_async.checkpoint.state import read_state
from omni_async.config import Config, load
from omni_async.records.write.files import read_lines
from omni_async.records.write.ledger_file import LedgerDamaged, require_prefix
from omni_async.runtime.driver.control_socket import Request, ask


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
