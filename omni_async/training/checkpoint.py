"""Saves and loads the tensors of a checkpoint through torch.distributed.checkpoint.

The files are sharded safetensors, which any number of ranks can read.

The tensors are the trained parameters (only adapters under LoRA), the auxiliary policies (`auxiliary.<which>.<name>`)
and the optimizer's state. Saving and loading are collective. Saving copies everything to host memory first, and writes
in a separate thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.torch_version import TorchVersion

from omni_async.training import TrainingError

# A process without a process group may save, too; the writing thread's warning has no other switch.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")

# In torch 2.11 a stager clears its own tables after the first use, and the second one raises KeyError.
STAGERS_LAST = TorchVersion(torch.__version__) >= "2.13"
FOLDER = "tensors"
MODEL = "model."
AUXILIARY = "auxiliary."
_OPTIMIZER = "optimizer."


def build_stager(device: torch.device) -> DefaultStager:
    """Build the stager, which copies tensors to host memory and reuses that memory, pinned for an accelerator.

    Args:
        device: the device of the tensors."""
    accelerated = device.type != "cpu" and torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=accelerated,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=accelerated,
        )
    )


def begin_save(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    auxiliary: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None,
    stager: DefaultStager,
) -> Future[Any]:
    """Copy the tensors to save; the future is done when this rank's files are in `folder`.

    Args:
        folder: the checkpoint's, the same on every rank.
        parameters: the trained parameters, by name.
        auxiliary: tensors of the auxiliary policies, as `<which>.<name>`.
        optimizer: the optimizer of the parameters.
        group: the ranks' group on the CPU, used for nothing else meanwhile; None with a single rank.
        stager: the same for every checkpoint. The previous checkpoint must have been written."""
    tensors = _weights(parameters, auxiliary) | {
        key: _vector(value) for key, value in _optimizer_tensors(parameters, optimizer).items()
    }
    writer = HuggingFaceStorageWriter(str(folder / FOLDER), save_distributed=True)
    saving = async_save(
        tensors,
        storage_writer=writer,
        process_group=group,
        async_stager=stager,
        no_dist=not dist.is_initialized(),
    )
    assert isinstance(saving, Future), "tensors are copied before it returns"
    return saving


def load(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    auxiliary: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Read a checkpoint into `parameters`, `auxiliary` and `optimizer`, in place.

    Args:
        folder, parameters, auxiliary, optimizer: as in `begin_save`, under any layout of ranks.

    Raises:
        TrainingError: the checkpoint belongs to another model, does not exist or cannot be read."""
    tensors = folder / FOLDER
    if not any(tensors.glob("*.safetensors")):
        raise TrainingError(f"{folder} is not a checkpoint: it has no {FOLDER}/*.safetensors")
    try:
        stored = set(HuggingFaceStorageReader(str(tensors)).read_metadata().state_dict_metadata)
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise TrainingError(f"checkpoint {folder} cannot be read: {type(error).__name__}: {reason}") from error
    weights = _weights(parameters, auxiliary)
    found = {key for key in stored if key.startswith((MODEL, AUXILIARY))}
    if weights.keys() != found:
        example = min(weights.keys() ^ found)
        raise TrainingError(
            f"checkpoint {folder} is of another model, LoRA setting, algorithm or trainer.ema: {example!r} is in only"
            " one of the two"
        )
    try:
        state = _allocate(parameters, optimizer, stored)
        wanted = weights | {key: _vector(value) for key, value in state.items()}
        read_tensors(wanted, storage_reader=HuggingFaceStorageReader(str(tensors)), no_dist=not dist.is_initialized())
    except Exception as error:  # names of no parameter, other shapes or dtypes, offsets outside the file
        reason = " ".join(str(error).split())[:500]
        raise TrainingError(f"checkpoint {folder} does not fit this model: {type(error).__name__}: {reason}") from error


def _weights(parameters: Mapping[str, nn.Parameter], auxiliary: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {MODEL + name: p.detach() for name, p in parameters.items()} | {
        AUXILIARY + name: tensor for name, tensor in auxiliary.items()
    }


def _optimizer_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by name.

    A parameter that never had a gradient has no state; torch's own helper would invent it."""
    return {
        f"{_OPTIMIZER}{key}.{name}": value
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def _vector(value: Tensor) -> Tensor:
    """Return a view with at least one dimension, because the reader cannot slice a scalar."""
    return value.reshape(1) if value.ndim == 0 else value


def _allocate(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, stored: set[str]
) -> dict[str, Tensor]:
    """Allocate zeroed optimizer state with the stored keys, to read the checkpoint into it."""
    optimizer.state.clear()
    tensors = {}
    fused = optimizer.defaults.get("fused")  # then the step number is on the parameter's device
    for entry in sorted(key for key in stored if key.startswith(_OPTIMIZER)):
        key, name = entry.removeprefix(_OPTIMIZER).split(".", 1)
        parameter = parameters[name]
        if key == "step":
            value = torch.zeros((), device=parameter.device if fused else "cpu")
        else:
            value = torch.zeros_like(parameter, requires_grad=False)
        optimizer.state[parameter][key] = value
        tensors[entry] = value
    return tensors
