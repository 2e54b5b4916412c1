"""Measures each trainer rank's memory while it loads a model: all weights on every rank, or only its shards."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import msgspec
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from omni_async_pipelines.parts import empty_part, load_part

from benchmarks.arguments import command_parser
from benchmarks.ranks import on_ranks
from omni_async.algorithms.registry import find_objective
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.training.backends.fsdp2 import Fsdp2Backend
from omni_async.training.device import init_process_group

_HELP = """\
Write a random Qwen-Image transformer in bfloat16, and load it in float32 on ranks of FSDP2 (CPU, gloo), first whole on
every rank, as a family without build_components is, then each rank its shards.

  python -m benchmarks.load_peak                        # 150 MB of files, 2 ranks: half a minute
  python -m benchmarks.load_peak --layers 16 --ranks 4

Prints the highest anonymous memory of every rank above what it had before, and the ratio of the largest. Exit codes: 0
the ratio is at most 0.6, 1 it is not, 2 wrong usage.
"""
_MOST = 0.6
_PAUSE_S = 0.002
_TIMEOUT_S = 600.0


class Load(NamedTuple):
    """The cost of loading on a rank: anonymous bytes above those before, and seconds. The digest is rank 0's."""

    above: int
    seconds: float
    digest: str


class Whole:
    """The policy interface needed for loading: all weights at once."""

    components = ("transformer",)

    def __init__(self, path: str) -> None:
        self.path = path

    def load_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        return {"transformer": load_part(QwenImageTransformer2DModel, self.path, "transformer", dtype)}


class Shards(Whole):
    """The same model, built without weights."""

    def build_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        return {"transformer": empty_part(QwenImageTransformer2DModel, self.path, "transformer", dtype)}


def write_checkpoint(path: str, layers: int) -> None:
    """Write about 19 MB a layer, in several files."""
    torch.manual_seed(0)
    model: Any = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    model.bfloat16().save_pretrained(Path(path) / "transformer", max_shard_size="60MB")


class Peak:
    """The highest anonymous memory, in bytes above the initial value."""

    def __init__(self) -> None:
        self._before = self.most = _anonymous()
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PAUSE_S):
            self.most = max(self.most, _anonymous())

    @property
    def above(self) -> int:
        return self.most - self._before


def _anonymous() -> int:
    """Return the bytes of this process without a backing file."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def _load(rank: int, ranks: int, init_method: str, policy: Any) -> Load:
    cpu = torch.device("cpu")
    init_process_group(rank, ranks, init_method, _TIMEOUT_S, cpu)
    raw = {"model": {"path": policy.path}, "data": {"prompts": "none"}, "trainer": {"workers": ranks}}
    config = msgspec.convert(raw, Config)
    dist.barrier()  # the first collective's own memory is not the model's
    peak, began = Peak(), time.perf_counter()
    with peak.watched():
        backend = Fsdp2Backend(config, find_objective("flow_grpo"), policy, cpu, ParallelLayout(rank, ranks))
    return Load(peak.above, time.perf_counter() - began, backend.digest)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("load_peak", _HELP)
    parser.add_argument("--layers", type=int, default=8, help="layers of 19 MB (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.layers < 1 or options.ranks < 2:
        parser.error("expected --layers >= 1 and --ranks >= 2")
    with tempfile.TemporaryDirectory() as folder:
        writer = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(folder, options.layers))
        writer.start()
        writer.join()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
        sys.stdout.write(f"{size / 1e6:.0f} MB of bfloat16 files, float32 weights, {options.ranks} ranks\n")
        arms = {policy: on_ranks(options.ranks, _load, policy) for policy in (Whole(folder), Shards(folder))}
    peaks, digests = [], set()
    for policy, loads in arms.items():
        name = type(policy).__name__.lower()
        for rank, load in enumerate(loads):
            sys.stdout.write(f"{name:8} rank {rank}: {load.above / 1e6:.0f} MB, {load.seconds:.1f} s\n")
            digests |= {load.digest} - {""}
        peaks.append(max(load.above for load in loads))
    if len(digests) != 1:
        sys.stdout.write(f"the weights differ: {sorted(digests)}\n")
        return 1
    ratio = peaks[1] / peaks[0]
    sys.stdout.write(f"shards / whole: {ratio:.2f} (at most {_MOST})\n")
    return 0 if ratio <= _MOST else 1


if __name__ == "__main__":
    sys.exit(main())
