"""Loads the trained components of one rank, in one of two ways.

`WholeModel` uses the policy's own loading. `ShardedModel` builds the components without weights, spreads them over the
ranks, and lets each rank read its part from the checkpoint's files, so that no rank ever holds the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni_async.config.load import read_model_json
from omni_async.diffusion.policy import BuildsEmpty, Policy
from omni_async.tokens.policy import TokenPolicy, is_frozen
from omni_async.weights.buckets import digest_tensors
from omni_async.weights.lora import diffusers_name, is_injected_adapter
from omni_async.weights.shards import own_slices

WEIGHT_STEMS = ("diffusion_pytorch_model", "model")  # file names of weights in diffusers and transformers


class Loading(Protocol):
    """Loads the components of a rank.

    components: the built modules by component; they may be changed and spread over ranks before `fill`."""

    components: nn.ModuleDict

    def digest(self, dtype: torch.dtype) -> str:
        """Return the digest of the checkpoint's weights in `dtype`, without frozen ones. Call it first."""

    def fill(self, device: torch.device) -> None:
        """Allocate parameters without memory on `device`, and read their values from the checkpoint."""

    def stored(self, name: str) -> Any:
        """Return a parameter in the checkpoint; `[...]` or a slice reads it. Not after `fill`."""


class WholeModel:
    """Loads all weights at once, in `dtype`."""

    def __init__(self, policy: Policy | TokenPolicy, dtype: torch.dtype) -> None:
        self.components = nn.ModuleDict(policy.load_components(dtype)).eval()
        self._policy = policy

    def digest(self, dtype: torch.dtype) -> str:
        named = self.components.named_parameters()
        return digest_tensors((name, p.to(dtype)) for name, p in named if not is_frozen(self._policy, name))

    def fill(self, device: torch.device) -> None:
        """Do nothing: the weights are already loaded."""

    def stored(self, name: str) -> Any:
        return self.components.get_parameter(name).detach()


class ShardedModel:
    """Builds components without weights, and reads the rank's part of each from the files.

    Weights have `dtype`, independent of the files' dtype.

    Raises ValueError, one line, if names or shapes differ between files and model, or if a tensor that is in no file
    has no value."""

    def __init__(self, policy: BuildsEmpty, dtype: torch.dtype) -> None:
        self.components = nn.ModuleDict(policy.build_components(dtype)).eval()
        self._dtype = dtype
        self._stored: dict[str, dict[str, Any]] = {}
        for name, component in self.components.items():
            folder = Path(policy.path) / name
            self._stored[name] = stored = open_tensors(folder)
            _refuse_without_value(name, component)
            _refuse_others(folder, component, stored)

    def digest(self, dtype: torch.dtype) -> str:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, _ in self.components.named_parameters():
                # Rounded to the weights' dtype first, like the weights themselves.
                yield name, self.stored(name)[...].to(self._dtype).to(dtype)

        return digest_tensors(tensors())

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        for component, module in self.components.items():
            module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
            for name, tensor in module.state_dict().items():
                if not is_injected_adapter(f"{component}.{name}"):
                    _read(self._stored[component][diffusers_name(name)], tensor)
        self._stored.clear()

    def stored(self, name: str) -> Any:
        component, _, weight = name.partition(".")
        return self._stored[component][weight]


@torch.no_grad()
def read_weights(loading: Loading, weights: Mapping[str, Tensor], model: str) -> None:
    """Read the parameters of a checkpoint into tensors of a model of the same architecture.

    Args:
        loading: of the checkpoint, not filled.
        weights: the tensors by the parameters' names, of any dtype and sharding.
        model: the name of their model in errors.

    Raises:
        ValueError: names or shapes differ; names the first parameter that differs."""
    found = dict(loading.components.named_parameters())
    if differing := found.keys() ^ weights.keys():
        name = min(differing)
        raise ValueError(f"it {'has' if name in found else 'lacks'} {name}; expected the architecture of {model}")
    for name, tensor in weights.items():
        if (shape := tuple(found[name].shape)) != tuple(tensor.shape):
            raise ValueError(f"{name} has the shape {shape}, and {tuple(tensor.shape)} in {model}")
        _read(loading.stored(name), tensor)


def open_tensors(folder: Path) -> dict[str, Any]:
    """Return every tensor of a component's safetensors files, unread, by name."""
    for stem in WEIGHT_STEMS:
        index, alone = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if index.is_file():
            files = _indexed(index)
        elif alone.is_file():
            files = [alone.name]
        else:
            continue
        found: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(folder / file, "pt")
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ValueError(f"model.path: {folder / file} cannot be read: {error}") from None
        return found
    raise ValueError(f"model.path: {folder} has no {WEIGHT_STEMS[0]}.safetensors, nor an index of several")


def _indexed(index: Path) -> list[str]:
    """Return the files of weights that an index lists. Raises ValueError, one line, if it is damaged."""
    where = read_model_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) and Path(f).name == f for f in where.values()):
        raise ValueError(
            f"model.path: {index}: expected a weight_map from tensors to files in its folder; copy it again"
        )
    return sorted(set(where.values()))


def _refuse_without_value(component: str, module: nn.Module) -> None:
    """Refuse tensors on the meta device that are neither parameters nor in a file; name them."""
    for path, part in module.named_modules():
        unsaved = {name: part.get_buffer(name) for name in part._non_persistent_buffers_set}
        own = {name: value for name, value in vars(part).items() if name not in ("_parameters", "_buffers")}
        for name, value in (unsaved | own).items():
            if any(tensor.is_meta for tensor in _tensors_in(value)):
                raise ValueError(
                    f"model.path: {'.'.join(filter(None, (component, path, name)))} is on the meta device and in no"
                    " file; the family's build_components must compute it"
                )


def _tensors_in(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def _refuse_others(folder: Path, module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Refuse files whose names or shapes differ from the model's."""
    expected = module.state_dict()
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = {name for name in stored if name not in expected and not any(re.search(key, name) for key in ignored)}
    missing = expected.keys() - stored.keys()
    model = type(module).__name__
    for names, where in ((missing, f"the files lack {{}}, which {model} has"), (extra, f"{model} has no {{}}")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"model.path: {folder}: " + where.format(f"{min(names)}{more}"))
    for name, tensor in expected.items():
        shape = tuple(stored[name].get_shape())
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"model.path: {folder}: {name} has the shape {shape} in the files, and {tuple(tensor.shape)} in {model}"
            )


def _read(stored: Any, tensor: Tensor) -> None:
    """Read this rank's part of a tensor, and cast it."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
    elif (local := tensor.to_local()).numel():
        local.copy_(stored[own_slices(tensor)])
