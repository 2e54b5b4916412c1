"""Measures the memory of a long run: the driver with all roles, in virtual time, and the report of its folder.

Every size is a run in a new process, with the real coordinator, roles, observer and run folder on emulated devices.
Memory is the resident set of the process: before the first sample, after the last, and its maximum while the results
are written. The report is made in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import EMULATED, asked, benchmark_parser, write_json
from omni_async.aio.clock import WallClock
from omni_async.config import Config, load
from omni_async.config.reading import read_file
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.live_console import for_stream
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.summary import Summary
from omni_async.runtime.driver.observer import Observer
from omni_async.runtime.driver.results import Results
from omni_async.runtime.driver.session import Session
from omni_async.runtime.inprocess import InProcessCluster
from omni_async.runtime.keeper import Restarts
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.simulation.virtual_time import run as run_in_virtual_time

_HELP = """\
Memory of driver, coordinator, roles and report, by the number of samples of a run in virtual time.

  python -m benchmarks.long_run                       # 20,000 and 100,000 samples; 3 minutes
  python -m benchmarks.long_run --samples 1000000     # half an hour

OUT gets results.json; the table is printed.
"""
_RECIPE = EMULATED / "qwen_image_lora_h800.yaml"
_NO_BYTES = ("run.runtime=inprocess", "emulation.payload_scale=1e-6", "trainer.workers=1")


class Memory(msgspec.Struct, frozen=True):
    """One run: its samples, seconds of the parts, and megabytes of resident memory."""

    samples: int
    run_s: float
    results_s: float
    report_s: float
    begun_mb: float
    run_mb: float
    results_mb: float
    report_mb: float
    files: dict[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("long_run", _HELP)
    parser.add_argument("--samples", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        write_json(options.one, _one(options.samples[0]))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    found = []
    for samples in options.samples:
        path = options.out / f"{samples}.json"
        command = [sys.executable, "-m", "benchmarks.long_run", "--samples", str(samples), "--one", str(path)]
        subprocess.run(command, check=True)
        found.append(msgspec.json.decode(read_file(path, 2**20), type=Memory))
    write_json(options.out / "results.json", {"asked": asked(options), "runs": found})
    Console().print(_table(found))
    return 0


def _one(samples: int) -> Memory:
    with tempfile.TemporaryDirectory() as folder:
        config = _config(samples, folder)
        run = RunDirectory.create(config, WallClock())
        began = time.monotonic()
        begun_mb, run_mb, results_s = run_in_virtual_time(_drive(config, run), start=time.time())
        took, results_mb = time.monotonic() - began, megabytes("VmHWM")
        files = {path.name: path.stat().st_size for path in run.path.iterdir() if path.is_file()}
        report_s, report_mb = _report(run.path)
        run_s = took - results_s
        return Memory(samples, run_s, results_s, report_s, begun_mb, run_mb, results_mb, report_mb, files)


def _config(samples: int, folder: str) -> Config:
    config = load(_RECIPE, (*_NO_BYTES, f"run.dir={folder}"))
    per_update = config.trainer.groups_per_update * config.rollout.group_size
    return replace(config, trainer=replace(config.trainer, updates=max(1, samples // per_update)))


async def _drive(config: Config, run: RunDirectory) -> tuple[float, float, float]:
    """Run a job and write its results, as `train` does.

    Returns the megabytes before the first sample and after the last, and the seconds of the results."""
    inputs, clock = preflight(config), VirtualClock()
    cluster = InProcessCluster(inputs, run, clock)
    console = for_stream(io.StringIO(), config.trainer.updates)
    await cluster.start()
    observer = Observer(config, run, console, Sinks(), clock)
    begun_mb = megabytes("VmRSS")
    ending = await Session(config, cluster, observer, Restarts(0, clock), clock, ()).run(asyncio.Event())
    if ending.status != "done":
        raise RuntimeError(f"the run ended as {ending.status}: {ending.reason}")
    run_mb, began = megabytes("VmRSS"), time.monotonic()
    _write(Results(run, inputs, Sinks(), False), observer, clock.now())
    return begun_mb, run_mb, time.monotonic() - began


def _write(results: Results, observer: Observer, now: float) -> Summary:
    summary = observer.summary("done", None, None, now)
    attempt = Attempt(observer.started, now, "done", None, 0, observer.version, observer.wall_s(now))
    return results.write(observer, summary, attempt)


def _report(folder: Path) -> tuple[float, float]:
    """Return the seconds of `omni-async report`, and the most megabytes that it held."""
    began = time.monotonic()
    code = (
        "import sys; from omni_async.cli import main; from benchmarks.long_run import megabytes;"
        " code = main(sys.argv[1:]); print(megabytes('VmHWM')); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", folder], check=True, capture_output=True, text=True)
    return time.monotonic() - began, float(done.stdout.split()[-1])


def megabytes(kind: str) -> float:
    """Return a number of /proc/self/status, such as VmRSS or VmHWM, in megabytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) * 1024 / 1e6


def _table(found: Sequence[Memory]) -> Table:
    columns = ("begun, MB", "after run, MB", "results, MB", "report, MB", "run, s", "results, s", "report, s")
    table = Table("samples", *columns)
    for one in found:
        numbers = (one.begun_mb, one.run_mb, one.results_mb, one.report_mb, one.run_s, one.results_s, one.report_s)
        table.add_row(f"{one.samples:,}", *(f"{number:.0f}" for number in numbers))
    return table


if __name__ == "__main__":
    sys.exit(main())
