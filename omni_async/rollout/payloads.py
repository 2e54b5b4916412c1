"""Holds published weights as an engine takes them in.

Verified once when staged, turned into full weights under diffusers names when swapped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from omni_async.rollout.base import StagedVersion, require_whole
from omni_async.types import WeightManifest
from omni_async.weights.buckets import unpack
from omni_async.weights.lora import merged_weights

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Staged:
    """A version that arrived whole: the digest of `buckets` is the manifest's. `staged_s` is how long that took."""

    manifest: WeightManifest
    buckets: list[np.ndarray]
    staged_s: float

    def weights(
        self, base: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that this version changes, under diffusers names, one tensor at a time.

        They must not be written to.

        `base` maps every weight, as `component.name`, to its value without adapters. A full payload yields all of them;
        a LoRA payload yields `base + scale * B @ A`, made on `device`, for those it adapts. ValueError, before anything
        is yielded, if names or shapes do not fit."""
        version = self.manifest.version

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(device)

        if self.manifest.payload == "lora":
            received = dict(unpack(self.manifest, self.buckets))
            adapted = adapted_weights(received)
            if unknown := sorted(adapted - base.keys()):
                raise ValueError(f"version {version} adapts {unknown[0]!r}, which the model does not have")
            chosen = {name: base[name] for name in sorted(adapted)}
            return merged_weights(chosen, received, lora_scale(self.manifest), on_device, on_device)
        expected = {name: tuple(weight.shape) for name, weight in base.items()}
        got = {spec.name: spec.shape for spec in self.manifest.tensors}
        if wrong := sorted(set(expected.items()) ^ set(got.items())):
            name = wrong[0][0]
            raise ValueError(
                f"weights of version {version} do not fit the model: {name!r} is {got.get(name, 'absent')}, "
                f"expected {expected.get(name, 'nothing of that name')}"
            )
        return unpack(self.manifest, self.buckets)


async def take_in(engine: str, into: StagedVersion[Staged], manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
    """Verify a version beside the event loop, stage it and return its digest.

    Args:
        engine: the engine's name, for the error.
        into: where the version waits for the swap.
        manifest: what was published.
        buckets: what arrived, uint8; not to be written to while the version is in use.

    Raises:
        EngineError: it is damaged; nothing is staged."""
    started = time.perf_counter()
    await require_whole(engine, manifest, buckets)
    into.put(manifest.version, Staged(manifest, buckets, time.perf_counter() - started))
    return manifest.digest


def adapted_weights(adapters: Iterable[str]) -> set[str]:
    """Return the names of the weights that adapters `<module>.lora_A.weight` and `<module>.lora_B.weight` change."""
    return {name.rsplit(".lora_", 1)[0] + ".weight" for name in adapters}


def lora_scale(manifest: WeightManifest) -> float:
    """Return `manifest.lora["scale"]`, or alpha / rank where the manifest has these instead."""
    lora = manifest.lora or {}
    if "scale" in lora:
        return float(lora["scale"])
    if "alpha" in lora and "rank" in lora:
        return float(lora["alpha"]) / float(lora["rank"])
    raise ValueError(f"the LoRA payload of version {manifest.version} has neither a scale nor alpha and rank: {lora}")
