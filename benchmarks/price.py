"""Measures the price of the framework: CPU seconds and memory of the quickstart and of the plain loop, in turns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

import msgspec

from benchmarks.arguments import asked, benchmark_parser, write_json
from omni_async.records.write.summary import read_summary
from omni_async.records.write.usage import CpuAccount, family_of, pss_of

_HELP = """\
Train the quickstart for some updates in each arm, in turns, and print medians and their ratio to the plain loop.

  python -m benchmarks.price                                  # 5 repeats of 20 updates, about 15 minutes
  python -m benchmarks.price --updates 100 --repeats 1

CPU seconds are those of the process tree, Ray's daemons included. `training` lasts from the end of loading to the end
of the last validation; `command` is all of it.
"""
_ROOT = Path(__file__).parents[1]
_RECIPE = _ROOT / "recipes" / "quickstart" / "quickstart.yaml"
ARMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "vllm_omni": ("rollout.engine=vllm_omni",),
    "diffusers": ("rollout.engine=diffusers",),
}
# Beginnings of the lines that end loading and training.
_LOADED, _TRAINED = ("training", "generating the first samples"), ("trained", "done:")
_LOOK_S = 0.5
_LOOKS_PER_MEMORY = 4  # reading it costs more


class Run(NamedTuple):
    """A run's seconds, images (those of validation included), bytes, and first and last validation reward."""

    training_cpu_s: float
    command_cpu_s: float
    training_s: float
    images: int
    images_per_cpu_s: float
    peak_memory_bytes: int
    first_reward: float
    last_reward: float


class Tree:
    """A thread that measures the process tree of `pid` until `stop`; `peak_bytes`: the largest sum of memory."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._account, self._measuring, self._stopping = CpuAccount(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._measure_until_stopped, daemon=True)
        self.peak_bytes = 0
        self._thread.start()

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, those of ended processes included."""
        with self._measuring:
            self._account.measure(family_of(self._pid), {})
            return sum(self._account.by_role().values())

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _measure_until_stopped(self) -> None:
        looks = 0
        while not self._stopping.wait(_LOOK_S):
            self.cpu_s()
            looks += 1
            if looks % _LOOKS_PER_MEMORY == 0:
                self.peak_bytes = max(self.peak_bytes, pss_of(family_of(self._pid)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.updates, options.repeats) < 1:
        parser.error("--updates and --repeats: expected at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Run]] = {arm: [] for arm in options.arms}
    for repeat in range(options.repeats):
        for arm in options.arms:
            runs[arm].append(run(arm, options.updates, seed=repeat))
            _print(f"{arm}: {msgspec.json.encode(runs[arm][-1]._asdict()).decode()}")
    write_json(options.out / "results.json", {"options": asked(options), "runs": runs})
    for line in table(runs):
        _print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("price", _HELP)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="what is run (default: all)")
    parser.add_argument("--updates", type=int, default=20, help="policy updates of a run (default: 20)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each arm, seed by seed (default: 5)")
    return parser


def run(arm: str, updates: int, seed: int) -> Run:
    """Run an arm. RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["benchmarks.plain_loop", f"--updates={updates}", f"--seed={seed}"]
        if arm != "plain":
            settings = (*ARMS[arm], f"trainer.updates={updates}", f"run.seed={seed}", f"run.dir={folder}")
            words = ["omni_async.cli", "train", str(_RECIPE), *settings]
        with subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            tree = Tree(process.pid)
            marks, shown = _follow(process.stdout, tree)
            tree.stop()
        if process.returncode or len(marks) < 2:
            raise RuntimeError(f"{arm} ended with code {process.returncode}:\n{shown[-4000:]}")
        (loaded_cpu_s, loaded), (trained_cpu_s, trained), (command_cpu_s, _) = marks
        images, *rewards = _plain_results(shown) if arm == "plain" else _results(Path(folder))
        training = trained_cpu_s - loaded_cpu_s
        rate = images / training
        return Run(training, command_cpu_s, trained - loaded, images, rate, tree.peak_bytes, *rewards)


def _follow(stream: IO[str], tree: Tree) -> tuple[list[tuple[float, float]], str]:
    """Read a run's output. Returns CPU seconds and the time when it was loaded, trained and over; and the output."""
    marks: list[tuple[float, float]] = []
    shown = []
    for line in stream:
        shown.append(line)
        if len(marks) < 2 and line.startswith((_LOADED, _TRAINED)[len(marks)]):
            marks.append((tree.cpu_s(), time.monotonic()))
    marks.append((tree.cpu_s(), time.monotonic()))
    return marks, "".join(shown)


def _plain_results(shown: str) -> tuple[int, float, float]:
    found = msgspec.json.decode(shown.splitlines()[-1])
    return found["images"], found["first_reward"], found["last_reward"]


def _results(folder: Path) -> tuple[int, float, float]:
    """Return images, and the first and last validation reward."""
    summary = read_summary(next(folder.glob("*/summary.json")))
    first, *_, last = (point.value or 0.0 for point in summary.validation)
    images = summary.images + sum(point.samples or 0 for point in summary.validation)
    return images, first, last


def table(runs: dict[str, list[Run]]) -> list[str]:
    """Return the lines of a Markdown table: medians of every arm, and medians of ratios to the plain loop's run."""
    plain = runs.get("plain", [])
    rows = ["| " + " | ".join(["medians", *runs]) + " |", "|---|" + "---:|" * len(runs)]
    for name in Run._fields:
        row = [name]
        for own in runs.values():
            values = [float(getattr(one, name)) for one in own]
            cell = f"{median(values) / 2**30:.2f} GiB" if name.endswith("bytes") else f"{median(values):.4g}"
            bases = [float(getattr(one, name)) for one in plain]
            if own is not plain and len(bases) == len(values) and "reward" not in name and name != "images":
                cell += f" ({median(value / base for value, base in zip(values, bases, strict=True)):.2f} x)"
            row.append(cell)
        rows.append(f"| {' | '.join(row)} |")
    return rows


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
