"""Measures the path of a published version into an engine's parameters: copies, bytes per second, opened files.

Each pair of arms differs in one thing, and takes turns in one process:
- Pieces of a tensor are joined first, or copied into place.
- The base checkpoint of adapters is opened at every swap, or stays open.
- One thread hashes a version, or several do.

Everything is on the CPU; on an accelerator the same bytes go through pinned buffers.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import msgspec
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.copied_bytes import CopiedBytes
from omni_async.commands.bench.result import Machine, describe_machine, spread
from omni_async.rollout import base_weights
from omni_async.rollout.base_weights import BaseWeights
from omni_async.rollout.payloads import Staged
from omni_async.rollout.upload import Upload
from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.buckets import BucketSet, unpack
from omni_async.weights.digest import Bucket, combine, hashing_threads, tensor_pieces

_HELP = """\
Bytes that a swap copies, and their rate, before and after each change of its way.

  python -m benchmarks.swap                  # 1000 MB of eight ranks
  python -m benchmarks.swap --mb 100

OUT gets results.json; the table is printed. Exit codes: 0 full weights are copied once and the base's files are opened
once; 1 they are not; 2 wrong usage.
"""
_SIDE = 3072
_LAYERS = 60  # of Qwen-Image; the tiny checkpoint is narrower


class Arm(msgspec.Struct, frozen=True):
    """One way, in one repeat.

    `copied`: bytes copied per byte of the payload; `opened`: files; `faults`: pages that the kernel mapped."""

    part: str
    way: str
    seconds: float
    nbytes: int
    copied: float = 0.0
    opened: int = 0
    faults: int = 0


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    options: dict[str, object]
    arms: list[Arm]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("swap", _HELP)
    parser.add_argument("--mb", type=int, default=1000, help="payload of full weights, bfloat16 (default: 1000)")
    parser.add_argument("--ranks", type=int, default=8, help="trainer ranks that share its rows (default: 8)")
    parser.add_argument("--repeats", type=int, default=5, help="of every arm, taken in turns (default: 5)")
    options = parser.parse_args(arguments)
    if min(options.mb, options.ranks, options.repeats) < 1:
        parser.error("expected numbers of at least 1")
    arms = [*_full(options), *_base(options)]
    options.out.mkdir(parents=True, exist_ok=True)
    path = write_json(options.out / "results.json", Results(describe_machine(), asked(options), arms))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    _show(arms, console)
    console.print(f"written: {path}", markup=False, highlight=False)
    once = all(arm.copied <= 1.0 for arm in arms if arm.way == "into place")
    return 0 if once and not sum(arm.opened for arm in arms if arm.way == "stays open") else 1


def _full(options: argparse.Namespace) -> list[Arm]:
    """Measure full weights whose rows several ranks published, and their digest."""
    count = max(1, options.mb * 10**6 // (2 * _SIDE * _SIDE))
    names = [f"transformer.blocks.{number}.weight" for number in range(count)]
    live = {name: torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16) for name in names}
    staged = _published(names, options.ranks)
    named = [(s.name, s.dtype, s.shape, tensor_pieces(s, staged.buckets)) for s in staged.manifest.tensors]
    nbytes, upload = sum(tensor.nbytes for tensor in live.values()), Upload("cpu")
    plain = [(torch.zeros_like(one), one) for one in live.values()]

    def join() -> None:
        for name, weight in unpack(staged.manifest, staged.buckets):
            live[name].copy_(weight)

    def into_place() -> None:
        for name, weight in staged.weights(live, live, upload):
            live[name].copy_(weight)

    def memcpy() -> None:
        for target, source in plain:
            target.copy_(source)

    ways = {"plain copy": memcpy, "joined first": join, "into place": into_place}
    arms: list[Arm] = []
    for repeat in range(options.repeats + 1):  # the first is not counted: it maps the pages
        made = [_copied("full weights", way, nbytes, call) for way, call in ways.items()]
        for threads in sorted({1, hashing_threads()}):
            way = f"{threads} thread{'s' * (threads > 1)}"
            made.append(_timed("digest", way, nbytes, partial(combine, named, threads)))
        arms += made if repeat else []
    return arms


def _published(names: list[str], ranks: int) -> Staged:
    """Return a version whose rows are distributed over so many ranks, each in separate buckets."""
    pieces: dict[str, tuple[Piece, ...]] = dict.fromkeys(names, ())
    buckets: list[Bucket] = []
    generator = torch.Generator().manual_seed(0)
    rows = [len(part) for part in torch.empty(_SIDE).chunk(ranks)]
    for share in rows:
        own = BucketSet(256 * 2**20)
        own.fill((n, torch.randn(share, _SIDE, generator=generator, dtype=torch.bfloat16)) for n in names)
        for spec in own.specs:
            moved = (Piece(p.bucket + len(buckets), p.offset, p.nbytes) for p in spec.pieces)
            pieces[spec.name] += tuple(moved)
        buckets += own.buckets
    specs = tuple(TensorSpec(name, "bfloat16", (_SIDE, _SIDE), pieces[name]) for name in names)
    return Staged(WeightManifest(1, "full", "", specs), buckets, 0.0)


def _base(options: argparse.Namespace) -> list[Arm]:
    """Measure reading all weights that adapters could be added to, from a checkpoint in the page cache."""
    with tempfile.TemporaryDirectory(prefix="swap-") as name:
        path = Path(tiny_checkpoint("qwen_image", Path(name), layers=_LAYERS))
        kept = BaseWeights(path, ["transformer"])
        nbytes = sum(tensor.nbytes for tensor in kept.values())

        ways = {"opened again": lambda: BaseWeights(path, ["transformer"]), "stays open": lambda: kept}

        def read(base: BaseWeights) -> None:
            for tensor in base.values():
                tensor.sum()

        read(kept)
        arms: list[Arm] = []
        for way, make in [*ways.items()] * options.repeats:
            with patch.object(base_weights, "safe_open", side_effect=safe_open) as opened:
                arm = _timed("base of adapters", way, nbytes, lambda make=make: read(make()))  # type: ignore[misc]
            arms.append(msgspec.structs.replace(arm, opened=opened.call_count))
        return arms


def _copied(part: str, way: str, nbytes: int, call: Callable[[], None]) -> Arm:
    """Time a call, and count the copied bytes of another call."""
    timed = _timed(part, way, nbytes, call)
    with CopiedBytes() as copies:
        call()
    return msgspec.structs.replace(timed, copied=copies.count / nbytes)


def _timed(part: str, way: str, nbytes: int, call: Callable[[], object]) -> Arm:
    faults, started = _faults(), time.perf_counter()
    call()
    return Arm(part, way, time.perf_counter() - started, nbytes, faults=_faults() - faults)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _show(arms: list[Arm], console: Console) -> None:
    table = Table("part", "way", "GB/s", "times the first way", "copies", "opened files", "page faults")
    first: dict[str, list[float]] = {}
    for part, way in dict.fromkeys((arm.part, arm.way) for arm in arms):
        own = [arm for arm in arms if (arm.part, arm.way) == (part, way)]
        seconds = [arm.seconds for arm in own]
        before = first.setdefault(part, seconds)
        rate = spread([arm.nbytes / arm.seconds / 1e9 for arm in own]).median
        ratio = spread([b / s for b, s in zip(before, seconds, strict=True)]).median
        last = own[-1]
        counts = (f"{last.copied:.2f}", f"{last.opened}", f"{last.faults}")
        table.add_row(part, way, f"{rate:.2f}", f"{ratio:.2f}", *counts)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
