"""Stores trajectories of finished groups that wait for the trainer, a safetensors file per group.

It also checks the safetensors files of a checkpoint without reading their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from omni_async.checkpoint.state import FILE as STATE_FILE
from omni_async.checkpoint.state import CheckpointError, State
from omni_async.config.reading import open_file
from omni_async.config.tensor_files import read_header

_FOLDER = "groups"
_ARRAY = "array"  # the name of an unnamed array: an emulated trajectory


def check_tensors(folder: Path) -> None:
    """Raise CheckpointError if a safetensors header below `folder` does not describe the bytes after it.

    `check_manifest` has already excluded links."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with open_file(path, within=folder) as file:
                read_header(file, path.stat().st_size)  # bounded, unlike the next line
            with safe_open(path, "np"):  # maps the file, and checks every tensor's type, shape and place
                pass
        except ValueError as error:
            raise CheckpointError(f"{path} {error}") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def check_groups(folder: Path, state: State) -> None:
    """Raise CheckpointError unless every group that waits for the trainer has a file."""
    for group in state.control.ready:
        if not _path(folder, group.group).is_file():
            raise CheckpointError(f"{_path(folder, group.group)} is missing, though {STATE_FILE} has the group")


def write_group(folder: Path, group: int, trajectories: list[Any]) -> None:
    """Write a group's trajectories. Blocks; run it in a thread.

    Args:
        folder: the checkpoint's.
        group: the group's number.
        trajectories: a TensorDict or an array per sample, in the samples' order."""
    leaves = {f"{sample}/{name}": leaf for sample, value in enumerate(trajectories) for name, leaf in _leaves(value)}
    path = _path(folder, group)
    path.parent.mkdir(exist_ok=True)
    # The format has no views: a tensor in another memory order would be read back in that order, and tensors that share
    # memory are refused.
    if all(isinstance(leaf, np.ndarray) for leaf in leaves.values()):
        from safetensors.numpy import save_file as save_arrays

        save_arrays({name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}, path)
    else:
        import torch
        from safetensors.torch import save_file as save_tensors

        save_tensors({name: leaf.clone(memory_format=torch.contiguous_format) for name, leaf in leaves.items()}, path)


def read_group(folder: Path, group: int, samples: int) -> list[Any]:
    """Return the trajectories that `write_group` wrote. Blocks; run it in a thread.

    Args:
        folder: the checkpoint's.
        group: the group's number.
        samples: how many there must be.

    Raises:
        CheckpointError: they are missing, unreadable, or of other samples."""
    path = _path(folder, group)
    try:
        found: list[dict[str, Any]] = [{} for _ in range(samples)]
        for name, leaf in _read(path):
            sample, _, rest = name.partition("/")
            if not sample.isdecimal():
                raise CheckpointError(f"{path} holds {name[:80]!r}, which is of no sample")
            found[int(sample)][rest] = leaf
        if not all(found):
            raise CheckpointError(f"{path} does not hold {samples} samples")
        return [_joined(leaves) for leaves in found]
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _path(folder: Path, group: int) -> Path:
    return folder / _FOLDER / f"{group:09d}.safetensors"


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        names = list(file.keys())
        arrays = all(name.endswith(f"/{_ARRAY}") for name in names)
        if arrays:
            yield from ((name, file.get_tensor(name)) for name in names)
    if not arrays:
        from safetensors.torch import load_file

        yield from load_file(path).items()


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        yield _ARRAY, value
        return
    for name, leaf in value.items():
        if hasattr(leaf, "batch_size"):
            yield from _leaves(leaf, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", leaf


def _joined(leaves: dict[str, Any]) -> Any:
    if leaves.keys() == {_ARRAY}:
        return leaves[_ARRAY]
    from tensordict import TensorDict

    return TensorDict({tuple(name.split("/")): leaf for name, leaf in leaves.items()}, batch_size=[])
