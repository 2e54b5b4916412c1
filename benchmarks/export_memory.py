"""Measures each trainer rank's memory for an export: for its own rows only, or with all weights gathered on rank 0.

Trainers that publish a whole state dict gather it on rank 0.

Each arm runs in separate processes, one per rank, over gloo; a thread watches their anonymous memory, which excludes
the shared memory of the versions. glibc returns freed memory to the system (`MALLOC_MMAP_THRESHOLD_`), so that the
result contains only memory in use, not the holes between.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.ranks import on_ranks
from benchmarks.weights_model import SizedPolicy
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.training.device import init_process_group
from omni_async.training.engine import copy_out
from omni_async.weights.buckets import BucketSet
from omni_async.weights.lora import merged_weights
from omni_async.weights.shards import own_rows, whole

Arm = Literal["own rows", "gathered"]
_BUCKET_BYTES = 256 * 2**20
_MOST = 1.2
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "500000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_EVERY_S = 0.001
_HELP = """\
Peak anonymous memory that an export takes of every rank, beside the bytes of its own rows and of one tensor.

  python -m benchmarks.export_memory
  python -m benchmarks.export_memory --megabytes 400 --ranks 4 --lora-rank 0

OUT gets results.json; the table is printed. Exit codes: 0 no rank that exports its own rows took more than 1.2 times
them and one tensor, 1 one did, 2 wrong usage.
"""


class Record(msgspec.Struct, frozen=True):
    """The export of one rank, in megabytes.

    The peak, its own published `rows`, and the largest tensor in float32 (adapters are merged in float32). `lora_rank`:
    0 without adapters."""

    arm: Arm
    dtype: str
    lora_rank: int
    rank: int
    peak: float
    rows: float
    tensor: float

    @property
    def missed(self) -> bool:
        return self.arm == "own rows" and self.peak > _MOST * self.rows + self.tensor


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    settings: dict[str, Any]
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    options.out.mkdir(parents=True, exist_ok=True)
    records = [
        record
        for dtype, lora_rank in dict.fromkeys([("float32", 0), ("bfloat16", 0), ("bfloat16", options.lora_rank)])
        for arm in get_args(Arm)
        for record in measure(arm, options.megabytes, options.ranks, dtype, lora_rank)
    ]
    results = Results(describe_machine(), asked(options), records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(table(records))
    console.print(f"written: {path}", markup=False, highlight=False)
    return 1 if any(record.missed for record in records) else 0


def measure(arm: Arm, megabytes: float, ranks: int, dtype: str, lora_rank: int) -> list[Record]:
    """Export once from as many new processes, and return every rank's memory."""
    os.environ.update(_ENVIRONMENT)  # of the processes that are started
    return on_ranks(ranks, _work, arm, megabytes, dtype, lora_rank)


def _work(rank: int, ranks: int, init_method: str, arm: Arm, megabytes: float, dtype: str, lora_rank: int) -> Record:
    init_process_group(rank, ranks, init_method, 120.0, torch.device("cpu"))
    base, adapters = _sharded(megabytes, lora_rank, init_device_mesh("cpu", (ranks,)))
    into: torch.dtype = getattr(torch, dtype)
    dist.barrier()
    with watched() as peak:
        kept = _export(arm, base, adapters, into, rank)
    rows = sum(own_rows(tensor, rank).numel() for tensor in base.values()) * into.itemsize
    largest = max(4 * tensor.numel() for tensor in base.values())
    del kept
    return Record(arm, dtype, lora_rank, rank, peak[0] / 1e6, rows / 1e6, largest / 1e6)


def _sharded(megabytes: float, lora_rank: int, mesh: DeviceMesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return float32 weights of a model of that size, sharded by FSDP2, and adapters for all of them."""
    [(component, module)] = SizedPolicy(str(megabytes)).load_components(torch.float32).items()
    fully_shard(module, mesh=mesh)
    base: dict[str, Tensor] = {f"{component}.{name}": p for name, p in module.named_parameters()}
    adapters: dict[str, Tensor] = {}
    for name, tensor in base.items() if lora_rank else ():
        for half, shape in (("A", (lora_rank, tensor.shape[1])), ("B", (tensor.shape[0], lora_rank))):
            adapter = name.replace(".weight", f".lora_{half}.weight")
            adapters[adapter] = distribute_tensor(torch.full(shape, 0.01), mesh, [Shard(0)])
    return base, adapters


@torch.no_grad()
def _export(
    arm: Arm, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], dtype: torch.dtype, rank: int
) -> BucketSet:
    buckets = BucketSet(_BUCKET_BYTES)
    if arm == "own rows":
        copy_out(buckets, base, adapters, 1.0, dtype, rank)
        return buckets
    gathered = merged_weights(base, adapters, 1.0, load=whole, load_adapter=whole)
    if rank == 0:
        buckets.fill(gathered, dtype)
    else:
        for _ in gathered:
            pass
    return buckets


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yield a list; at the end its one number is the peak rise of this process's anonymous memory, in bytes."""
    before, peak, over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            peak[0] = max(peak[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], anonymous_bytes() - before)


def anonymous_bytes() -> int:
    """Return this process's resident memory without a backing file, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or later")


def table(records: Sequence[Record]) -> Table:
    result = Table(
        "export", "published as", "adapters of rank", "trainer rank", "peak, MB", "own rows, MB", "a tensor, MB",
        "peak / (rows + tensor)", title="memory that an export takes",
    )  # fmt: skip
    for record in records:
        result.add_row(
            record.arm,
            record.dtype,
            str(record.lora_rank or "none"),
            str(record.rank),
            *(f"{value:.1f}" for value in (record.peak, record.rows, record.tensor)),
            f"{record.peak / (record.rows + record.tensor):.2f}{' !' if record.missed else ''}",
        )
    return result


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("export_memory", _HELP)
    add = parser.add_argument
    add("--megabytes", type=float, default=200.0, metavar="MB", help="of float32 weights (default: 200)")
    add("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    add("--lora-rank", type=int, default=32, metavar="R", help="of the adapters that are merged; 0: none (default: 32)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
