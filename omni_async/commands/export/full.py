"""Writes a whole model: the base model's folder, with new weights for the trained components.

Weights are read, merged and written one file at a time, so that memory holds one file's tensors, never a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import _getdtype, save_file
from torch import Tensor

from omni_async.commands.export.base import BaseModel
from omni_async.commands.export.folder import Progress, copy_file
from omni_async.config import ConfigError
from omni_async.config.writing import replacing, write_atomic
from omni_async.training.trained import TrainedWeights
from omni_async.weights.lora import merged_weights

_LARGEST_FILE = "5GB"


class FullModel:
    """The export of a whole model.

    base: the base model of the training.
    trained: weights, or adapters to merge into the base's weights.
    scale: of adapters, alpha / rank.
    dtype: of trained components' weights; None: the dtype of each in the base.
    linked: whether files that training did not change become hard links to the base model's.

    Raises ConfigError, one line, if the base's weights do not match the trained ones."""

    def __init__(
        self, base: BaseModel, trained: TrainedWeights, scale: float, dtype: torch.dtype | None, linked: bool
    ) -> None:
        self._base, self._trained, self._scale, self._dtype, self._linked = base, trained, scale, dtype, linked
        self._stored = {part: base.tensors(part) for part in base.parts}
        for part, stored in self._stored.items():
            self._require_same(part, stored)

    @property
    def nbytes(self) -> int:
        """Size of the folder in bytes."""
        return self._weights + sum((self._base.folder / path).stat().st_size for path in self._base.files())

    @property
    def room(self) -> int:
        """Least number of bytes that the disk needs: links take no space, if the file system supports them."""
        return self._weights if self._linked else self.nbytes

    @property
    def _weights(self) -> int:
        return sum(like.nbytes for part in self._stored for like in self._like(part).values())

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the model into an empty folder."""
        for path in self._base.files():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            copy_file(self._base.folder / path, folder / path, self._linked, progress)
        for part in self._stored:
            self._write_part(part, folder / part, progress)

    def _write_part(self, part: str, folder: Path, progress: Progress) -> None:
        folder.mkdir(exist_ok=True)
        stem = self._base.stem(part)
        split = split_torch_state_dict_into_shards(
            self._like(part), filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=_LARGEST_FILE
        )
        for file, names in split.filename_to_tensors.items():
            tensors = self._tensors(part, names)
            with replacing(folder / file) as unfinished:  # a base model may have such a file, hard-linked by now
                save_file(tensors, unfinished, {"format": "pt"})
            progress(sum(tensor.nbytes for tensor in tensors.values()))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            content = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_atomic(folder / f"{stem}.safetensors.index.json", content.encode())

    def _tensors(self, part: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors in their final form: trained, merged or the base's, in their dtypes."""
        like, stored, trained = self._like(part), self._stored[part], {*self._trained.names(part)}
        if not self._trained.is_adapter:
            found = self._trained.read(part, [name for name in names if name in trained])
            found |= {name: stored[name][...] for name in names if name not in found}
            return {name: found[name].to(like[name].dtype).contiguous() for name in names}
        factors = [
            factor
            for name in names
            for matrix in ("lora_A", "lora_B")
            if (factor := f"{name.removesuffix('.weight')}.{matrix}.weight") in trained
        ]
        weights = {name: stored[name][...] for name in names}
        merged = merged_weights(weights, self._trained.read(part, factors), self._scale)
        return {name: weight.to(like[name].dtype).contiguous() for name, weight in merged}

    def _like(self, part: str) -> dict[str, Tensor]:
        """Return a meta tensor for each tensor to write, of its shape and dtype."""
        found = {}
        for name, one in self._stored[part].items():
            own = _getdtype(one.get_dtype())
            dtype = self._dtype if self._dtype is not None and own.is_floating_point else own
            found[name] = torch.empty(one.get_shape(), dtype=dtype, device="meta")
        return found

    def _require_same(self, part: str, stored: Mapping[str, Any]) -> None:
        """Refuse a base model whose weights do not match the trained ones."""
        folder = self._base.folder / part
        for name in self._trained.names(part):
            shape = self._trained.shape(part, name)
            layer, dot, matrix = name.partition(".lora_")
            of = f"{layer}.weight" if dot else name
            if of not in stored:
                raise ConfigError(f"model.path: {folder} has no {of}, which was trained: it is another base model")
            base = tuple(stored[of].get_shape())
            fits = base == shape if not dot else base[1] == shape[1] if matrix.startswith("A") else base[0] == shape[0]
            if not fits:
                raise ConfigError(
                    f"model.path: {folder}: {of} has the shape {base}, and what was trained of it {shape}: it is"
                    " another base model"
                )
