"""Makes small whole runs: a recipe file on disk, the run it makes, and what that run left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from omni_async.config import Config, load
from omni_async.driver.train import train
from omni_async.preflight.check import preflight
from omni_async.tracking.files import read_lines
from omni_async.tracking.summary import Summary, read_summary

_SMALL: dict[str, Any] = {
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
COMMAND = (sys.executable, "-m", "omni_async.cli", "train")
# The repository on the path, for `tests.e2e.scorers`; a thread per process, as there are only two cores.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
_PROMPTS = (
    "the digit 7",
    "a photo of a red circle on a white background",
    "7",
    "a red digit on a white photo",
    "the white circle",
)


def write_recipe(folder: Path, checkpoint: str, *, prompts: tuple[str, ...] = _PROMPTS) -> Path:
    """Writes `folder/recipe.yaml`, its prompt file beside it and `folder/runs` as run.dir."""
    recipe = {**_SMALL, "model": {"path": checkpoint}, "run": {**_SMALL["run"], "dir": str(folder / "runs")}}
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


@dataclass(frozen=True)
class Run:
    """A finished run. `config` is what it was asked for, everything else what it left on disk."""

    config: Config
    path: Path
    summary: Summary

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return _lines(self.path / "ledger.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns a line per update; validation lines are in `validation`."""
        return [line for line in _lines(self.path / "metrics.jsonl") if "reward" in line]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [line for line in _lines(self.path / "metrics.jsonl") if "validation/reward" in line]

    @property
    def trace(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads((self.path / "trace.json").read_text())["traceEvents"]
        return events

    def weights(self) -> dict[str, torch.Tensor]:
        return checkpoint_weights(max((self.path / "checkpoints").glob("update-*")))


def run(recipe: Path, *overrides: str) -> Run:
    config = load(recipe, overrides)
    summary = train(preflight(config))
    path = Path(config.run.dir) / summary.run
    assert read_summary(path / "summary.json") == summary
    return Run(config, path, summary)


@dataclass(frozen=True)
class Answer:
    """The result of `omni-async train`: its exit code and output."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def line(self) -> str:
        """Returns the only line on stderr."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


def command_line(*arguments: str | Path, timeout: float = 120) -> Answer:
    started = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, cwd="/", env=ENVIRONMENT
    )
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


@contextlib.contextmanager
def started(
    until: str | tuple[str, ...], *arguments: str | Path, stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen[str]]:
    """Runs the command line in a session of its own, so that its process group can be signalled.

    Yields it when it has said a line that begins so, and leaves no process of it behind.
    """
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd="/",
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith(until):
                break
        else:
            raise AssertionError(f"it ended without a line that begins with {until}: {''.join(said)}")
        yield process
    finally:
        process.kill()
        process.wait()


def left_behind(recipe: Path, overrides: Sequence[str]) -> Run:
    """Finds the one run that the command line made in the recipe's folder."""
    config = load(recipe, overrides)
    (path,) = (path for path in Path(config.run.dir).iterdir() if (path / "config.yaml").exists())
    return Run(config, path, read_summary(path / "summary.json"))


def checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the trained parameters in a checkpoint folder, by diffusers name."""
    reader = HuggingFaceStorageReader(str(folder / "tensors"))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith("model.")
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        read_tensors(tensors, storage_reader=reader, no_dist=True)
    return {key.removeprefix("model."): value for key, value in tensors.items()}


def check_every_group_ended_once(run: Run) -> None:
    """Checks the conservation law, from the ledger file itself and not from the run's own counters."""
    counters, ledger = run.summary.counters, run.ledger
    groups = [line["group"] for line in ledger]
    assert len(groups) == len(set(groups)) == counters.admitted
    assert counters.live == 0 and run.summary.conserved
    for event in ("trained", "rejected", "dropped"):
        assert sum(line["event"] == event for line in ledger) == getattr(counters, event)
    per_update = run.config.trainer.groups_per_update
    assert counters.trained == per_update * run.summary.updates
    for line in ledger:
        if line["event"] != "trained":
            assert line["reason"]
            continue
        oldest, newest = line["step_versions"]
        assert line["admitted_version"] <= oldest <= newest < line["trained_version"]
        assert line["staleness"] == line["trained_version"] - 1 - oldest <= run.config.staleness.max_updates


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(path)]
