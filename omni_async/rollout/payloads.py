"""Holds published weights in an engine.

A version is verified once when it is staged, and converted to full weights under diffusers names when it is swapped
in."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import torch

from omni_async.rollout.base import StagedVersion, require_whole
from omni_async.rollout.upload import Upload
from omni_async.types import WeightManifest
from omni_async.weights.buckets import dtype_of, unpack, unpack_pieces
from omni_async.weights.lora import merged_weights


@dataclass(frozen=True)
class Staged:
    """A version received whole: the digest of `buckets` is the manifest's. `staged_s`: the seconds of staging."""

    manifest: WeightManifest
    buckets: list[np.ndarray]
    staged_s: float

    def weights(
        self, base: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], upload: Upload
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that this version changes, under diffusers names, one tensor at a time.

        A full payload yields all of them. A weight with a counterpart in `live` is copied into it, piece by piece, and
        yielded as that parameter, which torch does not copy onto itself. A LoRA payload yields `base + scale * B @ A`,
        computed on `upload`'s device, for the weights that it adapts.

        Args:
            base: every weight, as `component.name`, with its value without adapters.
            live: the engine's parameters by the same names; some may be fused, sharded or named differently.
            upload: copies to the engine's device.

        Raises:
            ValueError: names or shapes do not fit; nothing was yielded or written."""
        version = self.manifest.version
        if self.manifest.payload == "lora":
            received = dict(unpack(self.manifest, self.buckets))
            adapted = adapted_weights(received)
            if unknown := sorted(adapted - base.keys()):
                raise ValueError(f"version {version} adapts {unknown[0]!r}, which the model does not have")
            chosen = {name: base[name] for name in sorted(adapted)}
            return merged_weights(chosen, received, lora_scale(self.manifest), upload.load, upload.load)
        expected = {name: tuple(weight.shape) for name, weight in base.items()}
        got = {spec.name: spec.shape for spec in self.manifest.tensors}
        if wrong := sorted(set(expected.items()) ^ set(got.items())):
            name = wrong[0][0]
            raise ValueError(
                f"weights of version {version} do not fit the model: {name!r} is {got.get(name, 'absent')}, "
                f"expected {expected.get(name, 'nothing of that name')}"
            )
        return self._put(live, upload)

    def _put(self, live: Mapping[str, torch.Tensor], upload: Upload) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, pieces in unpack_pieces(self.manifest, self.buckets):
            parameter = live.get(spec.name)
            if parameter is not None and parameter.shape == spec.shape and parameter.is_contiguous():
                target = parameter.detach()
            elif len(pieces) == 1 and upload.device.type == "cpu":
                yield spec.name, pieces[0].view(spec.shape)
                continue
            else:
                target = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=upload.device)
            rows = target.view(-1).split([piece.numel() for piece in pieces])
            for into, piece in zip(rows, pieces, strict=True):
                upload.copy(into, piece)
            yield spec.name, target

    def some(self, live: Mapping[str, torch.Tensor], most: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield at most so many weights of a full payload that have a counterpart in `live`, as received."""
        if self.manifest.payload == "full":
            fit = (spec for spec in self.manifest.tensors if spec.name in live and live[spec.name].shape == spec.shape)
            yield from unpack(msgspec.structs.replace(self.manifest, tensors=tuple(islice(fit, most))), self.buckets)


async def take_in(engine: str, into: StagedVersion[Staged], manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
    """Verify a version in a thread, stage it and return its digest.

    Args:
        engine: the engine's name, for the error.
        into: where the version waits for the swap.
        manifest: of the published version.
        buckets: the received bytes, uint8; not to be written to while the version is in use.

    Raises:
        EngineError: the version is damaged; nothing is staged."""
    started = time.perf_counter()
    await require_whole(engine, manifest, buckets)
    into.put(manifest.version, Staged(manifest, buckets, time.perf_counter() - started))
    return manifest.digest


def in_shared_memory(buckets: Sequence[np.ndarray]) -> list[int]:
    """Copy buckets into memory that other processes of the machine can open by path.

    Returns:
        open files, one per bucket; the memory is freed when the last process closes it."""
    files: list[int] = []
    try:
        for bucket in buckets:
            files.append(os.memfd_create("omni_async_version"))
            with open(files[-1], "wb", closefd=False) as file:
                file.write(bucket.data)
    except BaseException:
        for file_number in files:
            os.close(file_number)
        raise
    return files


def mapped(paths: Sequence[str]) -> list[np.ndarray]:
    """Map shared buckets for reading, given their paths. The arrays keep the memory."""
    return [np.memmap(path, np.uint8, mode="r") for path in paths]


def adapted_weights(adapters: Iterable[str]) -> set[str]:
    """Return the names of the weights that adapters `<module>.lora_A.weight` and `<module>.lora_B.weight` change."""
    return {name.rsplit(".lora_", 1)[0] + ".weight" for name in adapters}


def lora_scale(manifest: WeightManifest) -> float:
    """Return `manifest.lora["scale"]`, or alpha / rank if the manifest has these instead."""
    lora = manifest.lora or {}
    if "scale" in lora:
        return float(lora["scale"])
    if "alpha" in lora and "rank" in lora:
        return float(lora["alpha"]) / float(lora["rank"])
    raise ValueError(f"the LoRA payload of version {manifest.version} has neither a scale nor alpha and rank: {lora}")
