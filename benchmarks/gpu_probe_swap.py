"""Measures the transfer of new weights to the device: adapters merged into a base, and a version in pieces.

Every way ends with the weights in the live parameters. The base is a file in the temporary folder, and in the page
cache, as after a run's first swap.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_run import Report, Settings
from omni_async.weights.lora import merged_weights

_RANK, _SCALE, _PIECES = 64, 2.0, 8


class _Weights:
    """Live bfloat16 weights on the device, a base of the same in a file, and adapters on the host."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        count, self.shape = (4, (256, 64)) if bench.small else (64, (12288, 3072))
        self.names = [f"transformer.blocks.{i}.to_q.weight" for i in range(count)]
        self.file = folder / "base.safetensors"
        one = bench.noise(*self.shape).to("cpu", torch.bfloat16)
        self.base = {name: one.clone() for name in self.names}
        save_file(self.base, str(self.file))
        self.live = {name: torch.empty_like(one, device=bench.device) for name in self.names}
        self.gigabytes = count * one.nbytes / 1e9
        down, up = bench.noise(_RANK, self.shape[1]).cpu(), bench.noise(self.shape[0], _RANK).cpu()
        self.adapters: dict[str, Tensor] = {}
        for name in self.names:
            module = name.removesuffix(".weight")
            self.adapters |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.live[name].copy_(weight, non_blocking=True)

    def merge(self, base: dict[str, Tensor]) -> None:
        def to_device(tensor: Tensor) -> Tensor:
            return tensor.to(self.bench.device, non_blocking=True)

        self.load(merged_weights(base, self.adapters, _SCALE, to_device, to_device))

    def note(self, name: str, work: Callable[[], object]) -> None:
        with self.bench.arm(name):
            seconds, gib = self.bench.time(work, repeats=2)
            self.bench.note(name, seconds=seconds, gb_per_s=self.gigabytes / seconds, gib=gib)


def swap(settings: Settings, report: Report) -> None:
    """Report GB/s of live weights, via the base and via the pieces."""
    bench = Bench(settings, report)
    with tempfile.TemporaryDirectory(prefix="gpu-probe-") as folder:
        weights = _Weights(bench, Path(folder))
        _adapters(bench, weights)
        _pieces(bench, weights)


def _adapters(bench: Bench, weights: _Weights) -> None:
    def from_file(device: str) -> None:
        with safe_open(weights.file, "pt", device=device) as file:
            weights.merge({name: file.get_tensor(name) for name in weights.names})

    weights.note("adapters, base read from its file", lambda: from_file("cpu"))
    if not bench.accelerated:
        return
    weights.note("adapters, base read to the device", lambda: from_file(str(bench.device)))
    weights.note("adapters, base kept in host memory", lambda: weights.merge(weights.base))
    pinned = {name: tensor.pin_memory() for name, tensor in weights.base.items()}
    weights.note("adapters, base kept in pinned memory", lambda: weights.merge(pinned))
    weights.note("copies from pinned memory alone", lambda: weights.load(pinned.items()))
    weights.note("copies from host memory alone", lambda: weights.load(weights.base.items()))


def _pieces(bench: Bench, weights: _Weights) -> None:
    """Measure a whole version whose tensors came from several ranks, each with its rows."""
    pieces = {name: list(tensor.chunk(_PIECES)) for name, tensor in weights.base.items()}
    as_bytes = {name: [piece.view(torch.uint8).numpy() for piece in found] for name, found in pieces.items()}

    def joined() -> None:
        for name, found in as_bytes.items():
            whole = torch.from_numpy(np.concatenate(found)).view(torch.bfloat16)
            weights.live[name].copy_(whole.view(weights.shape))

    def in_place() -> None:
        for name, found in pieces.items():
            for rows, piece in zip(weights.live[name].chunk(_PIECES), found, strict=True):
                rows.copy_(piece)

    weights.note(f"{_PIECES} pieces joined on the host", joined)
    weights.note(f"{_PIECES} pieces copied into place", in_place)
    if not bench.accelerated:
        return
    size = max(piece.numel() for piece in pieces[weights.names[0]])
    staging = [torch.empty(size, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    free = [torch.Event(bench.device.type) for _ in staging]

    def staged() -> None:
        turn = 0
        for name, found in pieces.items():
            for rows, piece in zip(weights.live[name].chunk(_PIECES), found, strict=True):
                free[turn].synchronize()
                buffer = staging[turn][: piece.numel()].view(piece.shape)
                buffer.copy_(piece)
                rows.copy_(buffer, non_blocking=True)
                free[turn].record()
                turn = 1 - turn

    weights.note(f"{_PIECES} pieces through two pinned buffers", staged)
