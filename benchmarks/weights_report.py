"""Formats tables and the results file of the weight benchmark.

Ratios are taken within a repeat, so that a slow moment affects both of their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.weights_measure import PublishRecord, ThroughputRecord
from omni_async.commands.bench.result import Machine, Spread, spread

BLOCKED_TARGET = 1.5  # in plain copies of the same tensors
THROUGHPUT_TARGET = 0.95
R = TypeVar("R")


class Results(msgspec.Struct, frozen=True):
    """All results. `notes`: omitted measurements, and why."""

    machine: Machine
    settings: dict[str, Any]
    publishes: list[PublishRecord]
    throughput: list[ThroughputRecord]
    notes: list[str]


def show(results: Results, console: Console) -> None:
    console.print(str(results.machine), markup=False, highlight=False)
    if results.publishes:
        console.print(_publishes(results.publishes))
    if results.throughput:
        console.print(_throughput(results.throughput))
    for note in results.notes:
        console.print(note, markup=False, highlight=False)


def _publishes(records: Sequence[PublishRecord]) -> Table:
    table = Table(
        "payload", "MB", "transport", "copy", "in blocks", "to new memory", "blocked", "/ copy", "/ in blocks",
        "swapped", "stage", "swap",
        title="A publish, ms: median (quartiles). `copy` is a plain copy of the same tensors; the trainer is blocked "
        "for `blocked`; all engines compute with the version after `swapped`.",
    )  # fmt: skip
    for (payload, _, transport), group in _by(records, lambda r: (r.payload, r.model_mb, r.transport)):
        ratio = spread([r.blocked / r.copy_tensors for r in group])
        of_blocks = spread([r.blocked / r.copy_blocks for r in group])
        columns = zip(
            *((r.copy_tensors, r.copy_blocks, r.copy_new, r.blocked, r.swapped, r.staged, r.swap) for r in group),
            strict=True,
        )
        copy, blocks, new, blocked, swapped, staged, swap = (
            spread([1e3 * seconds for seconds in column]) for column in columns
        )
        met = "" if ratio.median <= BLOCKED_TARGET else " !"
        table.add_row(
            payload,
            f"{group[0].nbytes / 1e6:.1f}",
            transport,
            _text(copy),
            _text(blocks),
            _number(new.median),
            _text(blocked),
            _text(ratio) + met,
            _text(of_blocks),
            _text(swapped),
            _number(staged.median),
            _number(swap.median),
        )
    return table


def _throughput(records: Sequence[ThroughputRecord]) -> Table:
    table = Table(
        "publishes",
        "per second",
        "samples/s",
        "of quiet",
        title="Generation while versions are published and swapped in (swap: step)",
    )
    quiet = {r.repeat: _rate(r) for r in records if r.arm == "quiet"}
    for (arm,), group in _by(records, lambda r: (r.arm,)):
        share = spread([_rate(r) / quiet[r.repeat] for r in group])
        met = "" if share.median >= THROUGHPUT_TARGET else " !"
        per_second = spread([r.publishes / r.seconds for r in group])
        table.add_row(
            arm.replace("_", " "), _text(per_second), _text(spread([_rate(r) for r in group])), _text(share) + met
        )
    return table


def _by(records: Sequence[R], key: Callable[[R], tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], list[R]]]:
    """Yield the records of one key together, keys in the order of their first appearance."""
    order = {k: number for number, k in enumerate(dict.fromkeys(map(key, records)))}
    for k, group in groupby(sorted(records, key=lambda r: order[key(r)]), key):
        yield k, list(group)


def _rate(record: ThroughputRecord) -> float:
    return record.samples / record.seconds


def _text(value: Spread) -> str:
    return f"{_number(value.median)} ({_number(value.low)}..{_number(value.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
