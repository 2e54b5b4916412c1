"""Defines the result of an overlap benchmark, as stored in `overlap.json`: every run's numbers and the machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.writing import write_atomic
from omni_async.performance.law import StageTimes
from omni_async.types import Count, Value

FILE_NAME = "overlap.json"
_LARGEST_FILE = 2**26  # bytes
_PACKAGES = ("omni-async", "ray", "torch", "vllm-omni")


class Spread(msgspec.Struct, frozen=True):
    """Median and quartiles over repeats."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class Stage(msgspec.Struct, frozen=True):
    """Seconds per update that a device of the stage was busy, and its jobs' coefficient of variation, if known."""

    seconds: Value
    variation: Value | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The steady part of one run: `updates` updates, without warm-up and drain.

    `step_s`: mean seconds per update; `steps_s`: each of them. `images_per_s`: samples trained on, by the whole job.
    `tokens_per_s`: that, times the mean tokens of generated answers; None if the model draws latents.
    `attribution` sums to `step_s`. `busy`: role -> busy, starved, backpressured fractions. `staleness` (groups by
    staleness) and `peak_memory_bytes` are the whole run's."""

    updates: Count
    step_s: Value
    steps_s: tuple[Value, ...]
    images_per_s: Value
    images_per_s_per_device: Value
    attribution: dict[str, Value]
    stages: dict[str, Stage]
    busy: dict[str, dict[str, Value]]
    staleness: dict[Count, Count]
    peak_memory_bytes: Count | None
    tokens_per_s: Value | None = None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its outcome.

    `folder` is relative to the benchmark's. `load`: the machine's 1-minute load average when the run began (None: a run
    found complete)."""

    round: Count
    status: Literal["done", "failed"]
    reason: str | None = None
    folder: str | None = None
    load: Value | None = None
    measured: Measured | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted seconds, comparable with measured ones: the emulation's time scale is applied.

    `simulated_s`: the simulator's step, or None with `not_simulated`."""

    times: StageTimes
    law_s: Value
    simulated_s: Value | None = None
    not_simulated: str | None = None


class ArmRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    schedule: str
    max_updates: Count
    devices: Value | None = None
    config: dict[str, Any] | None = None
    skipped: str | None = None
    prediction: Prediction | None = None
    runs: tuple[RunRecord, ...] = ()

    @property
    def measured(self) -> dict[int, Measured]:
        """The measured runs by round."""
        return {run.round: run.measured for run in self.runs if run.measured is not None}

    @property
    def failures(self) -> list[RunRecord]:
        return [run for run in self.runs if run.status == "failed"]


class Machine(msgspec.Struct, frozen=True):
    """Hardware and versions. `cpus`: available to this process. `gpus`: names, empty if not requested."""

    cpu: str
    cpus: Count
    memory_bytes: Count
    system: str
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        versions = ", ".join(
            [f"Python {self.python}", *(f"{name} {version}" for name, version in self.packages.items())]
        )
        return (
            f"{self.cpu}, {self.cpus} CPUs, {memory}{''.join(f', {gpu}' for gpu in self.gpus)}; {self.system};"
            f" {versions}"
        )


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark.

    `law`: the source of the predictions, in words. `time_scale`: of emulated devices; 1 for real ones."""

    recipe: str
    command: str
    started: str
    machine: Machine
    repeats: Count
    updates: Count
    time_scale: Value
    law: str
    arms: tuple[ArmRecord, ...]

    @property
    def failed(self) -> bool:
        return any(arm.failures for arm in self.arms)


def write_overlap(folder: Path, overlap: Overlap, summary: object, answer: object) -> None:
    """Write the result.

    Args:
        folder: the folder for `overlap.json`.
        overlap: the raw numbers, which `read_overlap` returns.
        summary: the table's numbers, written to the same file for other readers; `read_overlap` ignores them.
        answer: the numbers of the saving that is shown first, likewise; None without a comparison."""
    content = msgspec.to_builtins(overlap) | msgspec.to_builtins({"summary": summary, "answer": answer})
    write_atomic(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_overlap(folder: Path) -> Overlap:
    """Read the result. Raises ConfigError, one line, if the folder has none."""
    path, within = (folder / FILE_NAME, folder) if folder.is_dir() else (folder, None)
    try:
        overlap: Overlap = decode_json(read_file(path, _LARGEST_FILE, within), Overlap)
        return overlap
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error.strerror}, so no benchmark result") from None
    except OSError as error:
        raise ConfigError(f"{path}: no finished benchmark to report on: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a benchmark result: {error}") from None


def describe_machine(with_gpus: bool = False) -> Machine:
    """Describe this machine. `with_gpus` queries torch, which is imported for that."""
    return Machine(
        cpu=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(terse=True),
        python=platform.python_version(),
        packages=dict(_versions()),
        gpus=_gpus() if with_gpus else (),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[str, ...]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    name = torch.get_device_module(accelerator).get_device_name
    return tuple(name(i) for i in range(torch.accelerator.device_count()))
