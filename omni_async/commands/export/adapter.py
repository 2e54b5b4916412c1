"""Writes adapters as files that other programs load.

pytorch_lora_weights.safetensors                     diffusers' `load_lora_weights`, of the first trained component
<component>/pytorch_lora_weights.safetensors         of each further one (Wan2.2's low-noise expert)
comfyui/<component>.safetensors                      ComfyUI's names, if the family defines them

Factors are stored for alpha = rank, which programs assume for a file without alpha: B includes the factor alpha / rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from omni_async.commands.export.folder import Progress
from omni_async.config.writing import replacing
from omni_async.training.trained import TrainedWeights

FILE = "pytorch_lora_weights.safetensors"
OTHER_TOOLS = "comfyui"
# diffusers finds the adapters of every component under the name of the first.
_PREFIX = "transformer"
_FORMAT = {"format": "pt"}


class Adapter:
    """The export of adapters.

    trained: the factors.
    scale: alpha / rank.
    renamed: (pattern, replacement) pairs for the layers' names in ComfyUI; the first pattern that matches the whole
        name counts.
    dtype: None: the dtype of training."""

    def __init__(
        self, trained: TrainedWeights, scale: float, renamed: Sequence[tuple[str, str]], dtype: torch.dtype | None
    ) -> None:
        self._trained, self._scale, self._renamed, self._dtype = trained, scale, renamed, dtype

    @property
    def nbytes(self) -> int:
        """Largest number of bytes to write."""
        shapes = [self._trained.shape(c, name) for c in self._trained.components for name in self._trained.names(c)]
        return 8 * sum(torch.Size(shape).numel() for shape in shapes)

    @property
    def room(self) -> int:
        """Number of bytes that the disk needs for them."""
        return self.nbytes

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the files into an empty folder."""
        for number, component in enumerate(self._trained.components):
            factors = self._factors(component)
            own = folder / component if number else folder
            own.mkdir(exist_ok=True)
            with replacing(own / FILE) as unfinished:
                save_file({f"{_PREFIX}.{name}": one for name, one in factors.items()}, unfinished, _FORMAT)
            progress(sum(one.nbytes for one in factors.values()))
            if names := self._other_names(component):
                other = folder / OTHER_TOOLS
                other.mkdir(exist_ok=True)
                with replacing(other / f"{component}.safetensors") as unfinished:
                    save_file({names[name]: one for name, one in factors.items()}, unfinished, _FORMAT)
                progress(sum(one.nbytes for one in factors.values()))

    def _factors(self, component: str) -> dict[str, Tensor]:
        found = {}
        for name, factor in self._trained.read(component).items():
            scaled = factor * self._scale if name.endswith(".lora_B.weight") else factor
            found[name] = scaled.to(self._dtype or factor.dtype).contiguous()
        return found

    def _other_names(self, component: str) -> dict[str, str]:
        """Return ComfyUI's name of every factor; empty if any factor has none."""
        found: dict[str, str] = {}
        for name in self._trained.names(component):
            layer, _, matrix = name.partition(".lora_")
            matches = [(re.fullmatch(pattern, layer), replacement) for pattern, replacement in self._renamed]
            new = next((match.expand(replacement) for match, replacement in matches if match), None)
            if new is None:
                return {}
            found[name] = f"{new}.lora_{matrix}"
        return found
