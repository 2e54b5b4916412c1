"""Reads trained weights from a checkpoint without continuing training: needs no optimizer and no process group.

Any number of ranks may have written it. Tensors are read on request, so that a part of a large model can be read
without the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from omni_async.training import TrainingError
from omni_async.training.checkpoint import AUXILIARY, FOLDER, MODEL
from omni_async.weights.experts import At, Fused, checkpoint_parts

Which = Literal["drawing", "trained", "old", "ema"]
_AT_ONCE = 4 * 2**30


class TrainedWeights:
    """The trained tensors of one policy in a checkpoint.

    policy: `drawing`: the policy that generates samples and is validated (DiffusionNFT's old policy, for other
        objectives the policy in training); `trained`: the policy in training; `old`; `ema`: the moving average of
        `trainer.ema`.
    drew: whether the policy generated samples and was validated.
    not_finite: the names of the tensors read so far that contain a NaN or an infinity.
    is_adapter: whether the tensors are LoRA factors (`<layer>.lora_A.weight`, `<layer>.lora_B.weight`), not weights.

    Args:
        checkpoint: its folder.
        policy: as above.
        fused: `PipelineFamily.fused`, for the tensors of experts as in the files; empty: as the model holds them.

    Raises TrainingError, one line, if the checkpoint cannot be read or does not have the policy."""

    def __init__(self, checkpoint: Path, policy: Which = "drawing", fused: Fused = ()) -> None:
        self._folder = checkpoint / FOLDER
        try:
            stored = HuggingFaceStorageReader(str(self._folder)).read_metadata().state_dict_metadata
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise TrainingError(f"checkpoint {checkpoint} cannot be read: {type(error).__name__}: {reason}") from error
        prefixes = {name: f"{AUXILIARY}{name}." for name in ("old", "ema")} | {"trained": MODEL}
        there = [name for name, prefix in prefixes.items() if any(key.startswith(prefix) for key in stored)]
        drew = "old" if "old" in there else "trained"
        self.policy = drew if policy == "drawing" else policy
        self.drew = self.policy == drew
        if self.policy not in there:
            raise TrainingError(f"{checkpoint} has no {policy!r} policy; it has {', '.join(sorted(there)) or 'none'}")
        self._prefix = prefixes[self.policy]
        self._stored = {
            key.removeprefix(self._prefix): entry
            for key, entry in stored.items()
            if key.startswith(self._prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self._require_stored()
        self._places = {
            part: (key, at)
            for key, entry in self._stored.items()
            for part, at in checkpoint_parts(key, entry.size, fused)
        }
        self.not_finite: list[str] = []
        self.is_adapter = any(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in self._stored)

    def _require_stored(self) -> None:
        """Refuse tensors larger than the files: a header may claim any shape, and memory is allocated by the header."""
        held = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
        asked = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in self._stored.values())
        if asked > held:
            raise TrainingError(f"{self._folder} cannot be read: its tensors have {asked} bytes, and its files {held}")

    def names(self, component: str) -> list[str]:
        """Return the names of a component's trained tensors.

        An empty component means all of them; their names then begin with the component's."""
        start = _key(component, "")
        return sorted(key.removeprefix(start) for key in self._places if key.startswith(start))

    @property
    def components(self) -> list[str]:
        return sorted({key.partition(".")[0] for key in self._stored})

    def shape(self, component: str, name: str) -> tuple[int, ...]:
        key, at = self._places[_key(component, name)]
        return tuple(torch.empty(self._stored[key].size, device="meta")[at].shape)

    def read(self, component: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors of a component on the CPU, in the dtype of training.

        Args:
            component: as in `names`, such as `transformer`.
            names: the names to read; None: all.

        Raises:
            TrainingError: they cannot be read; one line."""
        names = self.names(component) if names is None else names
        wanted: dict[str, dict[str, At]] = defaultdict(dict)  # names and places by the stored tensor
        for name in names:
            key, at = self._places[_key(component, name)]
            wanted[key][name] = at
        entries = {key: self._stored[key] for key in wanted}
        try:
            found = {
                f"{self._prefix}{key}": torch.empty(one.size, dtype=one.properties.dtype)
                for key, one in entries.items()
            }
            read_tensors(found, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)
            tensors: dict[str, Tensor] = {}
            for key, parts in wanted.items():
                stored = found.pop(f"{self._prefix}{key}")
                # Parts are copied: files cannot hold views of one tensor.
                tensors |= {name: stored if at is ... else stored[at].clone() for name, at in parts.items()}
            bad = (name for name, one in tensors.items() if not torch.isfinite(one).all())
            self.not_finite += [_key(component, name) for name in bad]
        except Exception as error:
            reason = " ".join(str(error).split())[:500]
            raise TrainingError(f"{self._folder} cannot be read: {type(error).__name__}: {reason}") from error
        return tensors

    def stream(self, component: str, most: int = _AT_ONCE) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of a component with their names, without holding the whole component in memory.

        Args:
            component: as in `read`.
            most: bytes to read at a time; a larger tensor is read alone.

        Raises:
            TrainingError: as in `read`."""
        waiting: list[str] = []
        held = 0
        for name in self.names(component):
            stored = self._stored[self._places[_key(component, name)][0]]
            nbytes = math.prod(self.shape(component, name)) * stored.properties.dtype.itemsize
            if waiting and held + nbytes > most:
                yield from self.read(component, waiting).items()
                waiting, held = [], 0
            waiting.append(name)
            held += nbytes
        yield from self.read(component, waiting).items()


def _key(component: str, name: str) -> str:
    return f"{component}.{name}" if component else name
