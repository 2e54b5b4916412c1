"""Measures samples per second from a producer to a trainer: through the run's buffers, and through three plain queues.

Our arm does everything that a run does for a sample: leases from the coordinator, the object store, a reward worker's
score, groups, updates and publishes; only the engine, the scorer and the training take no time. In every arm the
trainer reads every page of every payload, the same number of samples is in flight, and each must arrive once and
complete.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.arguments import benchmark_parser
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.config.writing import write_atomic

_HELP = """\
Samples/s and MB/s from a producer actor to a trainer actor, all arms in turn in every repeat, on a local Ray.

  python -m benchmarks.data_plane                          # 64 KiB, 1 MiB and 16 MiB, five repeats: some minutes
  python -m benchmarks.data_plane --sizes 1MiB --repeats 9

The arm TransferQueue needs `pip install omni-async[bench]` and is left out without it. OUT gets results.json; the
table is printed.
"""
_SIZES = ("64KiB", "1MiB", "16MiB")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}
_BYTES_PER_RUN = 2**29
_LEAST_SAMPLES, _MOST_SAMPLES = 128, 2048
# Twice the bytes that may be in flight, because queues keep both inputs and outputs, for all arms of a size together.
_STORE_BYTES = 6 * 2**30
_TARGETS = "targets at 1 MiB: 3x the actor queue, 2x ray.util.queue, more than TransferQueue"


class Record(msgspec.Struct, frozen=True):
    """One run of one arm."""

    arm: str
    nbytes: int
    repeat: int
    samples: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def megabytes_per_s(self) -> float:
        return self.samples_per_s * self.nbytes / 1e6


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    skipped: dict[str, str]
    records: list[Record]


# ---- measuring -------------------------------------------------------------------------------------------------------


async def measure(
    sizes: Sequence[int], arms: Sequence[str], repeats: int, samples: int | None, done: Callable[[Record], None]
) -> list[Record]:
    """Run every arm in every repeat, after one uncounted run of each."""
    from benchmarks.data_plane_arms import ARMS

    records: list[Record] = []
    for nbytes in sizes:
        count = samples or num_samples(nbytes)
        opened: dict[str, Any] = {}
        try:
            for name in arms:
                opened[name] = ARMS[name](nbytes)
                await opened[name].run(_LEAST_SAMPLES)
            for repeat in range(repeats):
                for name, arm in opened.items():
                    records.append(Record(name, nbytes, repeat, count, await arm.run(count)))
                    done(records[-1])
        finally:
            for arm in opened.values():
                await arm.close()
    return records


def num_samples(nbytes: int) -> int:
    """Return enough samples for a run of some seconds; a multiple of every arm's batch."""
    wanted = _BYTES_PER_RUN // nbytes // _LEAST_SAMPLES * _LEAST_SAMPLES
    return max(_LEAST_SAMPLES, min(_MOST_SAMPLES, wanted))


def choose_arms() -> tuple[list[str], dict[str, str]]:
    """Return the arms that can run here, and the reasons against the others."""
    from benchmarks.data_plane_arms import ARMS
    from benchmarks.data_plane_transfer_queue import installed

    skipped = {} if installed() else {"TransferQueue": "not installed: pip install omni-async[bench]"}
    return [name for name in ARMS if name not in skipped], skipped


# ---- showing ---------------------------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> Table:
    from benchmarks.data_plane_arms import OURS

    made = Table(
        title=f"producer to trainer, median (lowest to highest) of the repeats; {_TARGETS}", title_justify="left"
    )
    for heading in ("payload", "arm", "samples/s", "MB/s", "omni_async is faster by"):
        made.add_column(heading, justify="left" if heading == "arm" else "right")
    for nbytes in dict.fromkeys(record.nbytes for record in records):
        of_size = [record for record in records if record.nbytes == nbytes]
        ours = {record.repeat: record.samples_per_s for record in of_size if record.arm == OURS}
        for arm in dict.fromkeys(record.arm for record in of_size):
            of_arm = [record for record in of_size if record.arm == arm]
            ratios = [ours[record.repeat] / record.samples_per_s for record in of_arm]
            made.add_row(
                format_size(nbytes),
                arm,
                _spread([record.samples_per_s for record in of_arm], ",.0f"),
                _spread([record.megabytes_per_s for record in of_arm], ",.0f"),
                "" if arm == OURS else _spread(ratios, ".2f"),
            )
        made.add_section()
    return made


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def parse_size(text: str) -> int:
    for unit in ("KiB", "MiB", "B"):
        number = text.removesuffix(unit)
        if number != text and number.isdecimal():
            size = int(number) * _UNITS[unit]
            if size >= 8:  # it contains a sample's number
                return size
    raise argparse.ArgumentTypeError(f"expected a size of at least 8B like 64KiB or 1MiB, got {text!r}")


def format_size(nbytes: int) -> str:
    unit = next(unit for unit in ("MiB", "KiB", "B") if nbytes % _UNITS[unit] == 0)
    return f"{nbytes // _UNITS[unit]} {unit}"


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("data_plane", _HELP)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(text) for text in _SIZES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, help="samples of a run, a multiple of 128 (default: by size)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {args.repeats}")
    if args.samples is not None and (args.samples < 1 or args.samples % _LEAST_SAMPLES):
        parser.error(f"--samples: expected a multiple of {_LEAST_SAMPLES}, got {args.samples}")
    from benchmarks.local_ray import local_ray  # imports Ray, which takes a second of a --help

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    arms, skipped = choose_arms()
    for name, why in skipped.items():
        console.print(f"{name} is left out: {why}", markup=False)
    ray_session = local_ray(16, _STORE_BYTES, OMP_NUM_THREADS="1", TQ_LOGGING_LEVEL="ERROR")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar, ray_session:
        task = bar.add_task("runs", total=len(args.sizes) * len(arms) * args.repeats)

        def done(record: Record) -> None:
            bar.advance(task)
            speed = f"{record.samples_per_s:,.0f} samples/s, {record.megabytes_per_s:,.0f} MB/s"
            console.print(
                f"{format_size(record.nbytes)}, repeat {record.repeat + 1} of {args.repeats}, {record.arm}: {speed}"
            )

        records = asyncio.run(measure(args.sizes, arms, args.repeats, args.samples, done))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    write_atomic(path, msgspec.json.format(msgspec.json.encode(Results(describe_machine(), skipped, records))))
    console.print(table(records))
    console.print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
