"""Training state on disk, through torch.distributed.checkpoint: sharded, readable by any number of ranks, and whole or absent.

A checkpoint holds the trained parameters (adapters only under LoRA), the further policies kept beside them (`shadow.<which>.<name>`), the
optimizer's state and `state.json`. It is written beside its
place and renamed when complete. Both functions are collective.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from omni_async.training.errors import TrainingError

_MODEL = "model."
_SHADOW = "shadow."
_OPTIMIZER = "optimizer."


class State(msgspec.Struct, frozen=True):
    """`state.json`. `extra` is the caller's: the policy version, the data position, ..."""

    optimizer_steps: int
    extra: dict[str, Any]
    format: int = 1


def save(
    folder: Path, parameters: Mapping[str, nn.Parameter], shadows: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Writes the checkpoint `folder`, replacing one of that name only once the new one is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    tensors = _weights(parameters, shadows) | _optimizer_tensors(parameters, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        write_tensors(tensors, checkpoint_id=partial)
    _barrier()
    if _rank() == 0:
        (partial / "state.json").write_bytes(msgspec.json.encode(state))
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def load(folder: Path, parameters: Mapping[str, nn.Parameter], shadows: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> State:
    """Reads a checkpoint into `parameters`, `shadows` and `optimizer`, in place. TrainingError if it is of another model or not there."""
    if not (folder / "state.json").is_file():
        raise TrainingError(f"{folder} is not a checkpoint: it has no state.json")
    state = msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
    stored = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    weights = _weights(parameters, shadows)
    found = {key for key in stored if key.startswith((_MODEL, _SHADOW))}
    if weights.keys() != found:
        example = min(weights.keys() ^ found)
        raise TrainingError(
            f"checkpoint {folder} is of another model, LoRA setting, algorithm or trainer.ema: {example!r} is in only one of the two"
        )
    tensors = weights | _allocate(parameters, optimizer, stored)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        read_tensors(tensors, checkpoint_id=folder)
    return state


def _weights(parameters: Mapping[str, nn.Parameter], shadows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_MODEL + name: p.detach() for name, p in parameters.items()} | {_SHADOW + name: tensor for name, tensor in shadows.items()}


def _optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by name. A parameter that never had a gradient has none, which torch's own helper would invent."""
    return {
        f"{_OPTIMIZER}{key}.{name}": value
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def _allocate(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, stored: set[str]) -> dict[str, Tensor]:
    """Gives the optimizer zeroed state of the stored kinds, to be read into."""
    optimizer.state.clear()
    tensors = {}
    for entry in sorted(key for key in stored if key.startswith(_OPTIMIZER)):
        key, name = entry.removeprefix(_OPTIMIZER).split(".", 1)
        parameter = parameters[name]
        value = torch.zeros(()) if key == "step" else torch.zeros_like(parameter, requires_grad=False)
        optimizer.state[parameter][key] = value
        tensors[entry] = value
    return tensors


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
