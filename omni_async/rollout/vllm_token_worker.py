"""Implements the worker's half of the vLLM engine: it loads versions between two tokens.

vLLM adds the extension to its worker class, so `self` is the worker. Arguments and answers of remote calls are numbers,
texts, bytes and containers of these. The weights are in memory that the engine's process shares by path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from omni_async.rollout.payloads import Staged, adapted_weights, lora_scale, mapped
from omni_async.rollout.upload import Upload
from omni_async.rollout.vllm_start import ENGINE, end_with
from omni_async.training.loading import open_tensors
from omni_async.types import WeightManifest
from omni_async.weights.buckets import unpack
from omni_async.weights.experts import Fused, checkpoint_parts
from omni_async.weights.lora import merged_weights

# vLLM imports this module before it loads the model, which may take longer than the engine lives.
if (engine := os.environ.get(ENGINE)) is not None and int(engine) != os.getpid():
    end_with(int(engine))


class TokenWorkerExtension:
    """The remote calls of the engine. vLLM runs them between two tokens; names must not be vLLM's."""

    model_runner: Any
    vllm_config: Any
    base_weights: _Checkpoint
    fused: Fused
    frozen_prefixes: Sequence[str]
    changed: set[str]  # prefixes of the weights that may differ from the checkpoint's

    def begin_versions(
        self, path: str, components: Sequence[str], frozen: Sequence[str], fused: Fused
    ) -> dict[str, Any]:
        """Learn which weights versions consist of.

        Args:
            path: the checkpoint's folder.
            components: the trained modules.
            frozen: prefixes of the weights that are never published.
            fused: `PipelineFamily.fused`."""
        self.fused = fused
        self.base_weights = _Checkpoint(Path(path), components, frozen, self.vllm_config.model_config.dtype)
        self.frozen_prefixes = self._in_vllm([f"{prefix}." for prefix in frozen])
        self.changed = set()
        if fused:  # a form of experts that cannot be loaded again ends the engine now, not after the first update
            self._load(iter(self.base_weights.items()), {""}, version=0)
        return {"weights": len(self.base_weights)}

    def swap_version(self, manifest: bytes, buckets: Sequence[str]) -> dict[str, Any]:
        """Load a version, given the paths of its buckets.

        Returns:
            `refused`: why names or shapes do not fit, before anything is written; otherwise None. `drawn`: the number
            of tokens that each request had then, by the engine's name for the request. All workers return the same.

        Raises:
            RuntimeError: a parameter was left out of the load."""
        about = msgspec.msgpack.decode(manifest, type=WeightManifest)
        staged = Staged(about, mapped(buckets), staged_s=0.0)
        try:
            weights, prefixes = self._weights_of(staged)
        except ValueError as error:
            return {"refused": str(error)}
        self._load(weights, prefixes, about.version)
        return {"refused": None, "drawn": self._drawn()}

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], prefixes: set[str], version: int) -> None:
        """Load all weights with one of these prefixes. Raises RuntimeError if a parameter was left out."""
        # vLLM's `reload_weights` would also empty the worker's cache of images, and the scheduler would still count on
        # it: the next request with a cached image would end the engine.
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        paths = [prefix.removesuffix(".") for prefix in self._in_vllm(prefixes)]
        modules = {path: model.get_submodule(path) for path in paths}
        with set_current_vllm_config(self.vllm_config):
            for module in modules.values():
                initialize_layerwise_reload(module)
            loaded = model.load_weights(weights)
            for module in modules.values():
                finalize_layerwise_reload(module, config)
        expected = {name for path, module in modules.items() for name, _ in module.named_parameters(path)}
        unloaded = expected - set(loaded)
        missing = sorted(name for name in unloaded if not name.startswith(tuple(self.frozen_prefixes)))
        if missing:
            raise RuntimeError(f"version {version}: {len(missing)} weights were not loaded, such as {missing[0]}")

    def _in_vllm(self, prefixes: Iterable[str]) -> list[str]:
        """Return vLLM's names of the checkpoint's prefixes; "" is the whole model."""
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        return list(prefixes) if mapper is None else mapper.apply_list(list(prefixes))

    def _weights_of(self, staged: Staged) -> tuple[Iterator[tuple[str, torch.Tensor]], set[str]]:
        """Return the weights to load for a version, and the prefixes of their names; note which it changes.

        Raises ValueError if names or shapes do not fit."""
        published = as_published(self.base_weights.shapes(), staged.manifest, self.fused)
        weights = staged.weights(published, {}, Upload("cpu"))  # of adapters, it only refuses unknown names
        before = self.changed
        if staged.manifest.payload == "full":
            self.changed = {""}
            return _apart(weights, self.fused), {""}
        # vLLM makes a layer anew of all its weights, adapted or not, and the layers of one module may be one in vLLM.
        adapters = dict(unpack(staged.manifest, staged.buckets))
        self.changed = {name.rsplit(".", 2)[0] + "." for name in adapted_weights(adapters)}
        prefixes = self.changed | before
        return merged_weights(self.base_weights.within(prefixes), adapters, lora_scale(staged.manifest)), prefixes

    def _drawn(self) -> dict[str, int]:
        """Return the number of tokens of each request. vLLM appends a dash and random characters to its name."""
        requests = self.model_runner.requests
        return {name.rpartition("-")[0]: len(state.output_token_ids) for name, state in requests.items()}


def as_published(
    stored: Mapping[str, Sequence[int]], manifest: WeightManifest, fused: Fused
) -> dict[str, torch.Tensor]:
    """Return weights of a checkpoint as tensors without content, by the names that a version has for them.

    Experts that the version fuses become one tensor, if the checkpoint has all of its parts."""
    found = {name: torch.empty(*shape, device="meta") for name, shape in stored.items()}
    for spec in manifest.tensors:
        whole = torch.empty(spec.shape, device="meta")
        parts = checkpoint_parts(spec.name, spec.shape, fused)
        if all(name in found and found[name].shape == whole[at].shape for name, at in parts):
            for name, _ in parts:
                del found[name]
            found[spec.name] = whole
    return found


def _apart(weights: Iterator[tuple[str, torch.Tensor]], fused: Fused) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights under the checkpoint's names."""
    for name, weight in weights:
        for part, at in checkpoint_parts(name, weight.shape, fused):
            yield part, weight[at]


class _Checkpoint(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint that versions consist of, read from its files in the dtype of the trainer."""

    def __init__(self, folder: Path, components: Sequence[str], frozen: Sequence[str], dtype: torch.dtype) -> None:
        self._dtype = dtype
        published, kept = (tuple(f"{prefix}." for prefix in prefixes) for prefixes in (components, frozen))
        self._stored = {
            name: stored
            for name, stored in open_tensors(folder).items()
            if name.startswith(published) and not name.startswith(kept)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._stored[name][...]
        return tensor.to(self._dtype)

    def within(self, prefixes: Iterable[str]) -> _Checkpoint:
        """Return the weights with one of these prefixes, unread."""
        found = copy(self)
        found._stored = {name: one for name, one in self._stored.items() if name.startswith(tuple(prefixes))}
        return found

    def shapes(self) -> dict[str, Sequence[int]]:
        return {name: stored.get_shape() for name, stored in self._stored.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
