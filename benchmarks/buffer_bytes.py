"""Measures the bytes of live samples' trajectories and media in a job of videos, with and without `buffer.max_bytes`.

The roles are the real ones of one process, devices are emulated and time is virtual; the payloads are real memory. The
store's values count until the last reference to them is gone, measured without the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import benchmark_parser
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.config import Config, ConfigError, check
from omni_async.config.section import SizeText, bytes_of, size_text
from omni_async.config.writing import replacing, write_atomic
from omni_async.control.events import RunEvent
from omni_async.performance.profile import Payload, Profile, ServiceTime, write_profile
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime import inprocess
from omni_async.runtime.inprocess import InProcessCluster
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.simulation.virtual_time import run as run_in_virtual_time
from omni_async.store import LocalStore, nbytes

_HELP = """\
Run a job of videos twice, with buffer.max_bytes and without, and draw the bytes that live samples hold over time.

  python -m benchmarks.buffer_bytes                                        # 64 MiB a trajectory; some seconds
  python -m benchmarks.buffer_bytes --max-bytes 2GiB --trajectory 128MiB --media 32MiB

OUT gets results.json and buffer_bytes.png; a table is printed. Exit codes: 0 held stayed within the bound, 1 it did
not, or a run failed, 2 wrong usage.
"""
_GROUP_SIZE, _PER_UPDATE, _BUDGET = 4, 2, 3
_WEIGHTS = 2**20
_SHOWN = 12  # rows of the table

Curve = list[tuple[float, int]]


class Record(msgspec.Struct, frozen=True):
    """One run.

    `curve`: (virtual seconds, bytes held) after every change; `counted`: the coordinator's own highest number."""

    max_bytes: int | None
    status: str
    reason: str | None
    updates: int
    seconds: float
    counted: int
    curve: Curve

    @property
    def most(self) -> int:
        return max(held for _, held in self.curve)


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    trajectory: int
    media: int
    records: list[Record]


class MeasuredStore(LocalStore):
    """A store that copies samples into separate memory, as a store between processes does, and measures its use.

    Weights are not copied."""

    def __init__(self, clock: Callable[[], float], curve: Curve) -> None:
        self._clock = clock
        self._curve = curve
        self._held = 0

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        return [self._copy(value) for value in values]

    def _copy(self, value: Any) -> Any:
        copied = np.array(value)
        self._change(nbytes(copied))
        weakref.finalize(copied, self._change, -nbytes(copied))
        return copied

    def _change(self, size: int) -> None:
        self._held += size
        self._curve.append((self._clock(), self._held))


def make_config(profile: Path, max_bytes: int | None, updates: int) -> Config:
    """Return a job whose engines are faster than its trainer, so that all buffers fill."""
    live = (_BUDGET + 1) * _PER_UPDATE
    raw = {
        "run": {"name": "buffer-bytes", "runtime": "inprocess"},
        "model": {"path": "none"},
        "data": {"prompts": "none"},
        "rollout": {"workers": 2, "group_size": _GROUP_SIZE, "max_batch": 2, "max_inflight": 4},
        "reward": {"batch": 2, "scorers": [{"name": "none"}]},
        "staleness": {"max_updates": _BUDGET},
        "buffer": {"trajectories": live * _GROUP_SIZE, "groups": live, "max_bytes": max_bytes},
        "algorithm": {"name": "flow_grpo"},
        "trainer": {"updates": updates, "groups_per_update": _PER_UPDATE},
        "checkpoint": {"every": 1_000_000},
        "tracking": {"mlflow": {"enabled": False}},
        "emulation": {"profile": str(profile)},
    }
    config = msgspec.convert(raw, Config)
    problem = check(config)
    assert problem is None, problem
    return config


def measure(trajectory: int, media: int, max_bytes: int | None, updates: int) -> Record:
    """Run the job to its end, in virtual time."""
    profile = Profile(
        name="videos",
        source="made up: an update takes 16 s to draw on both engines, 8 s to score and 24 s to train",
        generate=ServiceTime(unit_s=4.0, cv=0.1),
        score=ServiceTime(unit_s=1.0, cv=0.3),
        train=ServiceTime(unit_s=3.0, cv=0.1),
        publish=ServiceTime(fixed_s=1.0),
        payload=Payload(trajectory=trajectory, media=media, weights=_WEIGHTS),
    )
    curve: Curve = [(0.0, 0)]
    events: list[RunEvent] = []

    async def watch(cluster: InProcessCluster) -> None:
        while not any(event.kind == "ended" for event in events):
            # Without the pictures: they would keep media of samples that have ended.
            events.extend(replace(event, shown=()) for event in await cluster.coordinator.events())

    async def job(config: Config, folder: Path) -> None:
        clock = VirtualClock()
        with patch.object(inprocess, "LocalStore", lambda: MeasuredStore(clock.now, curve)):
            cluster = InProcessCluster(preflight(config), RunDirectory(folder), clock)
        await cluster.start()
        services = [asyncio.create_task(work) for work in cluster.services().values()]
        await asyncio.gather(watch(cluster), *cluster.work().values(), *cluster.workers().values())
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_profile(folder / "profile.json", profile)
        run_in_virtual_time(job(make_config(folder / "profile.json", max_bytes, updates), folder))
    (ended,) = (event.data for event in events if event.kind == "ended")
    made = [event.data for event in events if event.kind == "update"]
    return Record(
        max_bytes,
        ended["status"],
        ended["reason"],
        len(made),
        curve[-1][0],
        max((data["buffers"]["bytes"]["most"] for data in made), default=0),
        curve,
    )


# ---- what is shown ---------------------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> Table:
    """Return the most bytes held in each of several periods, a column per run."""
    made = Table(title="most bytes held, by virtual time", title_justify="left")
    made.add_column("seconds", justify="right")
    for record in records:
        made.add_column(_name(record), justify="right")
    end = max(record.seconds for record in records)
    for row in range(_SHOWN):
        since, until = end * row / _SHOWN, end * (row + 1) / _SHOWN
        cells = [
            size_text(most) if (most := _most(record.curve, since, until)) is not None else "" for record in records
        ]
        made.add_row(f"{since:.0f} to {until:.0f}", *cells, end_section=row == _SHOWN - 1)
    made.add_row("most", *(size_text(record.most) for record in records))
    made.add_row("most, as counted", *(size_text(record.counted) for record in records))
    made.add_row("seconds in all", *(f"{record.seconds:.0f}" for record in records))
    return made


def _name(record: Record) -> str:
    return "no bound" if record.max_bytes is None else f"max_bytes {size_text(record.max_bytes)}"


def _most(curve: Curve, since: float, until: float) -> int | None:
    """Return the most bytes held between two times; None if the run was over."""
    if since >= curve[-1][0]:
        return None
    before = [held for at, held in curve if at <= since][-1:]
    return max(before + [held for at, held in curve if since < at <= until])


def draw(records: Sequence[Record], path: Path) -> None:
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for record, colour in zip(records, ("#0072B2", "#D55E00"), strict=True):
        axes.step(
            [at for at, _ in record.curve],
            [held / 2**30 for _, held in record.curve],
            where="post",
            color=colour,
            label=_name(record),
        )
        if record.max_bytes is not None:
            axes.axhline(record.max_bytes / 2**30, color=colour, linestyle="--", linewidth=1)
    axes.set(xlabel="virtual seconds", ylabel="GiB that live samples hold", ylim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110)


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    try:
        return bytes_of(msgspec.convert(text, SizeText))
    except msgspec.ValidationError:
        raise argparse.ArgumentTypeError(f"expected a size like 64MiB, got {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("buffer_bytes", _HELP)
    parser.add_argument("--trajectory", type=parse_size, default="64MiB", help="of a sample (default %(default)s)")
    parser.add_argument("--media", type=parse_size, default="16MiB", help="of a sample (default %(default)s)")
    parser.add_argument("--max-bytes", type=parse_size, default="1GiB", help="the bound (default %(default)s)")
    parser.add_argument("--updates", type=int, default=12, help="updates of each run (default %(default)s)")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        records = [measure(args.trajectory, args.media, bound, args.updates) for bound in (args.max_bytes, None)]
    except ConfigError as error:
        console.print(str(error))
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(describe_machine(), args.trajectory, args.media, records)
    write_atomic(args.out / "results.json", msgspec.json.format(msgspec.json.encode(results)))
    draw(records, args.out / "buffer_bytes.png")
    console.print(table(records))
    console.print(f"results: {args.out / 'results.json'}, {args.out / 'buffer_bytes.png'}")
    for record in records:
        if record.status != "done":
            console.print(f"{_name(record)}: {record.status}: {record.reason}")
    stayed = records[0].most <= args.max_bytes
    verdict = "within" if stayed else "EXCEEDED"
    console.print(f"most held {size_text(records[0].most)}, bound {size_text(args.max_bytes)}: {verdict}")
    return 0 if stayed and all(record.status == "done" for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
