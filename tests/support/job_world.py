"""The world of real jobs, for every test that runs one: recipes on disk, the job in this process, in virtual time, as
the command line in a process of its own, or on Ray actors that are killed meanwhile; and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from omni_async.config import Config, load
from omni_async.control.events import RunEvent
from omni_async.performance.profile import Payload, Profile, ServiceTime, write_profile
from omni_async.records.write.attempts import Fault, read_faults
from omni_async.records.write.files import read_lines
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary, read_summary
from omni_async.runtime.driver.control_socket import ControlError, Request, ask
from omni_async.runtime.driver.train import train
from omni_async.runtime.inprocess import events_of
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.simulation.virtual_time import run as run_in_virtual_time
from omni_async.types import Span
from tests.runtime.runtime_world import RememberingConsole
from tests.support.configs import with_sections, write_recipe_file
from tests.support.killed_job import Job, problems
from tests.support.patience import PATIENCE, wait_for
from tests.support.places import ROOT

COMMAND = (sys.executable, "-m", "omni_async.cli", "train")
# The repository on the path, for `tests.e2e.scorers`; a thread per process, as there are only two cores.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# ---- recipes ---------------------------------------------------------------------------------------------------------

_REAL: dict[str, Any] = {
    "run": {"name": "e2e", "seed": 3, "runtime": "inprocess", "startup_timeout_s": 240},
    "data": {"prompts": "prompts.txt"},
    "rollout": {
        "engine": "diffusers",
        "group_size": 4,
        "sampling": {"height": 32, "width": 32},
        "num_inference_steps": 4,
        "max_inflight": 8,
        "max_batch": 8,
        "sde": {"kind": "flow", "noise_level": 0.7, "window": {"size": 2, "range": [0, 3]}},
    },
    "reward": {"scorers": [{"name": "jpeg_size"}]},
    "staleness": {"max_updates": 0},
    "algorithm": {"clip_range_nats": 1.0},
    "trainer": {"updates": 3, "groups_per_update": 2, "micro_batch_size": 3, "optimizer": {"name": "sgd", "lr": 10.0}},
    "tracking": {"mlflow": {"enabled": False}},
}
_PROMPTS = (
    "the digit 7\na photo of a red circle on a white background\n7\na red digit on a white photo\nthe white circle\n"
)
_EMULATED: dict[str, Any] = {
    "run": {"name": "emulated", "runtime": "inprocess"},
    "model": {"pipeline": "no_such_family", "path": "no/such/model"},
    "data": {"prompts": "no/such/prompts.txt"},
    "rollout": {
        "workers": 2,
        "group_size": 4,
        "sampling": {"height": 32, "width": 32},
        "max_batch": 4,
        "max_inflight": 8,
    },
    "reward": {"workers": 1, "batch": 4, "scorers": [{"name": "no_such_scorer"}]},
    "buffer": {"trajectories": 64, "groups": 64},
    "trainer": {"updates": 12, "groups_per_update": 8},
    "validation": {"prompts": "no/such/validation.txt"},
    "tracking": {"mlflow": {"enabled": False}},
    "emulation": {"profile": "profile.json"},
}
_SMALL = Payload(trajectory=20_000, media=3_000, weights=100_000)
PROFILE = Profile(
    name="small",
    source="made up",
    generate=ServiceTime(fixed_s=2.0, unit_s=1.0),
    score=ServiceTime(fixed_s=0.5, unit_s=0.25),
    proximal=ServiceTime(unit_s=0.2),
    train=ServiceTime(fixed_s=0.4, unit_s=0.4),
    step=ServiceTime(fixed_s=1.0),
    export=ServiceTime(fixed_s=0.5),
    publish=ServiceTime(fixed_s=1.5),
    swap=ServiceTime(fixed_s=0.25),
    switch=ServiceTime(fixed_s=2.0),
    payload=_SMALL,
)


def slow_at(slow: str, seconds: float, payload: Payload = _SMALL) -> Profile:
    """Returns a profile in which everything is quick but for one stage."""
    times = {stage: ServiceTime(fixed_s=seconds if stage == slow else 0.002) for stage in PROFILE.stages()}
    return Profile(name="small", source="made up", payload=payload, **times)


def write_recipe(folder: Path, checkpoint: str) -> Path:
    """Writes a recipe for a real model, and its prompt file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text(_PROMPTS)
    return write_recipe_file(folder / "recipe.yaml", _REAL, {"model": {"path": checkpoint}})


def write_emulated(folder: Path, profile: Profile = PROFILE, **sections: Any) -> Path:
    """Writes a recipe whose model, prompts and scorers exist nowhere, with these changes of its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(folder / "profile.json", profile)
    return write_recipe_file(folder / "recipe.yaml", _EMULATED, sections)


# ---- a job in this process, and what a job leaves --------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run. `config` is what it was asked for, everything else what it left on disk."""

    config: Config
    path: Path
    summary: Summary

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return self._lines("ledger.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns a line per update; validation lines are in `validation`."""
        return [line for line in self._lines("metrics.jsonl") if "validation/reward" not in line]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [line for line in self._lines("metrics.jsonl") if "validation/reward" in line]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read_lines(self.path / name)]

    @property
    def trace(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads((self.path / "trace.json").read_text())["traceEvents"]
        return events

    def spans(self, kind: str) -> list[dict[str, Any]]:
        """Returns what the timeline says of each span of that kind."""
        return [event["args"] for event in self.trace if event["ph"] == "X" and event["name"] == kind]

    @property
    def actors(self) -> set[str]:
        named = (event for event in self.trace if event["ph"] == "M" and event["name"] == "process_name")
        return {event["args"]["name"] for event in named}

    def weights(self, update: int | None = None) -> dict[str, Any]:
        """Reads the trained parameters in a checkpoint, the last one unless another is named, by diffusers name."""
        import torch
        from torch.distributed.checkpoint import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

        folders = sorted((self.path / "checkpoints").glob("update-*" if update is None else f"update-{update:06d}"))
        reader = HuggingFaceStorageReader(str(folders[-1] / "tensors"))
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if key.startswith("model.")
        }
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            read_tensors(tensors, storage_reader=reader, no_dist=True)
        return {key.removeprefix("model."): value for key, value in tensors.items()}

    def check_every_group_ended_once(self) -> Run:
        """Checks the conservation law, from the ledger file itself and not from the run's own counters."""
        counters, ledger = self.summary.counters, self.ledger
        groups = [line["group"] for line in ledger]
        assert len(groups) == len(set(groups)) == counters.admitted
        assert counters.live == 0 and self.summary.conserved
        for event in ("trained", "rejected", "dropped"):
            assert sum(line["event"] == event for line in ledger) == getattr(counters, event)
        assert counters.trained == self.config.trainer.groups_per_update * self.summary.updates
        for line in ledger:
            if line["event"] != "trained":
                assert line["reason"]
                continue
            oldest, newest = line["step_versions"]
            assert line["admitted_version"] <= oldest <= newest < line["trained_version"]
            assert line["staleness"] == line["trained_version"] - 1 - oldest <= self.config.staleness.max_updates
        return self


def run(recipe: Path | Config, *overrides: str) -> Run:
    """Trains in this process."""
    config = recipe if isinstance(recipe, Config) else load(recipe, overrides)
    summary = train(preflight(config))
    path = Path(config.run.dir) / summary.run
    assert read_summary(path / "summary.json") == summary
    return Run(config, path, summary)


def left_behind(recipe: Path, overrides: Sequence[str] = ()) -> Run:
    """Finds the one run that the command line made in the recipe's folder."""
    config = load(recipe, overrides)
    (path,) = (path for path in Path(config.run.dir).iterdir() if (path / "config.yaml").exists())
    return Run(config, path, read_summary(path / "summary.json"))


# ---- an emulated job in virtual time ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emulated:
    config: Config
    events: Sequence[RunEvent]

    @property
    def spans(self) -> list[Span]:
        return [span for event in self.events if event.kind == "spans" for span in event.data["spans"]]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == "update"]

    @property
    def ended(self) -> dict[str, Any]:
        (ended,) = (event.data for event in self.events if event.kind == "ended")
        return ended

    def steps(self, first: int, last: int) -> list[float]:
        """Returns the virtual seconds of updates `first` + 1 to `last`."""
        finished = [update["finished"] for update in self.updates]
        return [after - before for before, after in pairwise(finished[first - 1 : last])]


def emulate(recipe: Path | Config, *overrides: str, folder: Path | None = None) -> Emulated:
    """Runs a job in virtual time; wall-clock seconds are only what its messages cost. What it leaves goes to `folder`
    or beside the recipe. The run must end well, with every update made."""
    inputs = preflight(recipe if isinstance(recipe, Config) else load(recipe, overrides))
    if folder is None:
        assert isinstance(recipe, Path)
        folder = recipe.parent / f"run-{len(list(recipe.parent.iterdir()))}"
    folder.mkdir(exist_ok=True)
    events = run_in_virtual_time(events_of(inputs, RunDirectory(folder), VirtualClock))
    made = Emulated(inputs.config, events)
    assert (made.ended["status"], made.ended["reason"]) == ("done", None)
    assert [update["version"] for update in made.updates] == list(range(1, made.config.trainer.updates + 1))
    return made


# ---- the command line, in a process of its own -----------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The result of `omni-async train`: its exit code and output."""

    code: int
    stdout: str
    stderr: str

    @property
    def line(self) -> str:
        """Returns the only line on stderr."""
        (line,) = self.stderr.splitlines()
        return line


def command_line(*arguments: str | Path, timeout: float = 120, environment: Mapping[str, str] = ENVIRONMENT) -> Answer:
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/", env=environment)
    return Answer(done.returncode, done.stdout, done.stderr)


def trained(recipe: Path, *overrides: str) -> Run:
    """Trains as a user does."""
    answer = command_line(recipe, *overrides, timeout=240)
    assert answer.code == 0, answer
    return left_behind(recipe, overrides)


@contextlib.contextmanager
def started(
    begins: str | tuple[str, ...], *arguments: str | Path, stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen[str]]:
    """Runs the command line in a session of its own, so that its process group can be signalled.

    Yields it when it has said a line that begins so, and leaves no process of it behind.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    command = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, **pipes, cwd="/", env=ENVIRONMENT, start_new_session=True)
    try:
        said = []
        for line in process.stdout or ():
            said.append(line)
            if line.startswith(begins):
                break
        else:
            raise AssertionError(f"it ended without a line that begins with {begins}: {''.join(said)}")
        yield process
    finally:
        process.kill()
        process.wait()


def signal_group(
    number: int, line: str, *arguments: str | Path, once: Callable[[], object] = lambda: True, after_s: float = 0.0
) -> list[psutil.Process]:
    """Signals the process group of a job, as `timeout`, SLURM and systemd do, `after_s` after a line that begins so
    and after `once` holds.

    Requires that the job ends within our patience, in order after SIGTERM. Returns the processes that ran before.
    """
    with started(line, *arguments) as job:
        wait_for(once, "the moment of the signal")
        time.sleep(after_s)
        running = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, number)
        rest = job.communicate(timeout=PATIENCE)[0]
        assert job.returncode == (130 if number == signal.SIGTERM else -number), rest
        return running


# ---- a job whose processes are killed or stopped ---------------------------------------------------------------------


class Disturbed:
    """A job in a thread of this process, on the Ray of this process or one of its own; `disturb` runs beside it."""

    def __init__(self, recipe: Path, *overrides: str) -> None:
        self.job = Job(recipe, [*overrides])
        self.console = RememberingConsole()
        self._summary: Summary | None = None

    @classmethod
    def emulated(cls, folder: Path, profile: Profile, **sections: Any) -> Disturbed:
        """Makes a job on Ray whose processes do nearly all of the time what the profile makes slow."""
        usual: dict[str, Any] = {
            # Longer than a busy machine keeps a healthy role waiting. A killed one is noticed at once.
            "run": {"runtime": "ray", "health_timeout_s": 20.0, "restarts": 20},
            "reward": {"workers": 2},
            "buffer": {"trajectories": 32, "groups": 16},
            "trainer": {"updates": 100_000, "groups_per_update": 2},
            "checkpoint": {"every": 3},
        }
        return cls(write_emulated(folder, profile, **with_sections(usual, sections)))

    def run(self, disturb: Callable[[Disturbed], None], timeout_s: float = 2 * PATIENCE) -> Summary:
        inputs = preflight(self.job.config)

        def work() -> None:
            self._summary = train(inputs, self.console)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            disturb(self)
        except BaseException:
            with contextlib.suppress(ControlError):
                ask(self.job.run / "control.sock", Request(stop=True), timeout_s=PATIENCE)
            thread.join(PATIENCE)
            raise
        thread.join(timeout_s)
        assert not thread.is_alive(), f"the run hangs: {self.console.phases[-1:]} {self.console.notes[-3:]}"
        assert self._summary is not None, "the run raised"
        return self._summary

    def wait_for(self, what: Callable[[], bool], timeout_s: float = PATIENCE) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            said = f"{self.console.phases[-1:]} {self.console.notes[-3:]}"
            assert time.monotonic() < end, f"it did not come to that: {said}"
            time.sleep(0.02)

    @property
    def last_update(self) -> int:
        return int(self.console.updates[-1]["update"])

    def updated(self, number: int, timeout_s: float = PATIENCE) -> None:
        """Waits until that many updates are made, in this attempt or before."""
        self.wait_for(lambda: any(update["update"] >= number for update in self.console.updates), timeout_s)

    def parts(self) -> dict[str, dict[str, Any]]:
        return self.job.parts()

    def signal(self, part: str, number: int) -> None:
        os.kill(self.parts()[part]["pid"], number)

    def stop(self) -> None:
        """Stops the run as Ctrl-C would, after two more updates."""
        self.updated(self.last_update + 2)
        ask(self.job.run / "control.sock", Request(stop=True), timeout_s=PATIENCE)

    def scale(self, **workers: int) -> dict[str, Any]:
        return ask(self.job.run / "control.sock", Request(workers), timeout_s=PATIENCE)

    @property
    def faults(self) -> list[Fault]:
        return read_faults(self.job.run / "faults.jsonl")

    def ledger(self) -> list[dict[str, Any]]:
        return self.job.lines("ledger.jsonl")

    def require_whole(self, summary: Summary) -> None:
        """Requires that the run ended on request, every group in one line and every update made of its groups."""
        assert (summary.status, summary.reason) == ("interrupted", "on request")
        found = problems(self.job, summary.updates)
        assert summary.conserved and not found, (found, self.faults)  # pytest explains no asserts of this file
        ledger = self.ledger()
        assert len(ledger) == summary.counters.admitted
        assert all(line["reason"].startswith("run interrupted") for line in ledger if line["event"] != "trained")
