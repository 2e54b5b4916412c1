"""Checks that no process of a long run grows: runs an emulated job and measures the memory of each of its processes
at every update."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.arguments import command_parser
from benchmarks.kill_everything import end_job
from omni_async.driver.control_socket import ControlError, Request, ask

RECIPE = Path(__file__).parents[1] / "recipes" / "emulated" / "qwen_image_lora_h800.yaml"
_HELP = """\
Run an emulated job on Ray actors, and compare each process's own memory (unique set size) in the middle and at the
end: medians over a tenth of the updates. Between the two lie 500 updates, and before them the time in which pools,
caches and the allocator's arenas fill.

  python -m benchmarks.memory                      # 1,250 updates: some minutes
  python -m benchmarks.memory trainer.updates=300 rollout.group_size=8

Exit codes: 0 no process grew by 2 % or more, 1 one did or the job failed, 2 wrong usage.
"""
# Small updates, many of them.
_OVERRIDES = (
    "emulation.time_scale=0.0005",
    "emulation.payload_scale=0.002",
    "rollout.group_size=8",
    "trainer.groups_per_update=8",
    "trainer.updates=1250",
    "checkpoint.every=50",
)
_MOST = 0.02


def sample(process: psutil.Process, parts: dict[str, int], found: dict[str, list[float]]) -> None:
    """Adds the megabytes of every process of the job, by part, or by kind."""
    names = {pid: name for name, pid in parts.items()}
    for one in [process, *process.children(recursive=True)]:
        try:
            name = names.get(one.pid) or ("driver" if one.pid == process.pid else _kind(one))
            if name is not None:
                found[name].append(one.memory_full_info().uss / 1e6)
        except psutil.Error:
            continue


def _kind(process: psutil.Process) -> str | None:
    """Names Ray's own processes, of which there is one each. Workers that wait for work, and helpers that come and
    go, have no name."""
    return {"raylet": "raylet", "gcs_server": "Ray's global store"}.get(process.name())


def measure(command: Sequence[str], log: Path) -> tuple[int, dict[str, list[float]]]:
    """Returns the job's exit code, and the samples of each process, one per update."""
    found: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, int] = {}
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert job.stdout is not None
    run = Path()
    try:
        with log.open("w") as out:
            for line in job.stdout:
                out.write(line)
                if line.startswith("run "):
                    run = log.parent / "runs" / line.split()[1]
                if line.startswith("update "):
                    try:
                        parts = parts or {
                            name: part["pid"]
                            for name, part in ask(run / "control.sock", Request(), 30)["parts"].items()
                        }
                    except ControlError:
                        continue
                    sample(psutil.Process(job.pid), parts, found)
        return job.wait(), found
    finally:
        end_job(job)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("memory", _HELP)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/memory"), help="where the run goes (default runs/memory)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", default=[], help="override a value of the recipe"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    overrides = [*_OVERRIDES, *options.overrides, f"run.dir={options.out / 'runs'}"]
    command = [sys.executable, "-m", "omni_async.cli", "train", str(options.recipe), *overrides]
    code, found = measure(command, options.out / "log")
    if code or not found:
        sys.stderr.write(f"the job ended with exit code {code}: {options.out / 'log'}\n")
        return 1
    lines, worst = (
        [
            "| process | MB after a quarter | halfway | at the end | growth of the second half |",
            "|---|---:|---:|---:|---:|",
        ],
        0.0,
    )
    for name, samples in sorted(found.items()):
        tenth = max(1, len(samples) // 10)
        early, half, late = (
            statistics.median(samples[start : start + tenth]) for start in (2 * tenth, 5 * tenth, len(samples) - tenth)
        )
        lines.append(f"| {name} | {early:.1f} | {half:.1f} | {late:.1f} | {late / half - 1:+.1%} |")
        worst = max(worst, late / half - 1)
    sys.stdout.write("\n".join([*lines, "", f"{max(map(len, found.values()))} updates"]) + "\n")
    return int(worst >= _MOST)


if __name__ == "__main__":
    sys.exit(main())
