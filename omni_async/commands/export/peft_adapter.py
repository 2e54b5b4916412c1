"""Writes the adapters of a model in transformers layout as the files of PEFT, which transformers loads.

adapter_config.json          the adapted layers and the rank
adapter_model.safetensors    the factors; B includes the factor alpha / rank, as in `adapter`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from omni_async.commands.export.folder import Progress
from omni_async.config.writing import replacing, write_atomic
from omni_async.training.trained import TrainedWeights

CONFIG, FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


class PeftAdapter:
    """The export of adapters of a model in transformers layout.

    trained: the factors.
    rank: of the adapters.
    scale: alpha / rank.
    base: the name of the base model.
    dtype: None: the dtype of training."""

    def __init__(self, trained: TrainedWeights, rank: int, scale: float, base: str, dtype: torch.dtype | None) -> None:
        self._trained, self._rank, self._scale, self._base, self._dtype = trained, rank, scale, base, dtype

    @property
    def nbytes(self) -> int:
        """Largest number of bytes to write."""
        return 4 * sum(torch.Size(self._trained.shape("", name)).numel() for name in self._trained.names(""))

    @property
    def room(self) -> int:
        """Number of bytes that the disk needs for them."""
        return self.nbytes

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the files into an empty folder; those of further components into a folder for each."""
        for number, component in enumerate(self._trained.components):
            own = folder / component if number else folder
            own.mkdir(exist_ok=True)
            tensors = {}
            for name, factor in self._trained.read(component).items():
                scaled = factor * self._scale if name.endswith(".lora_B.weight") else factor
                tensors[f"{PREFIX}{name}"] = scaled.to(self._dtype or factor.dtype).contiguous()
            with replacing(own / FILE) as unfinished:
                save_file(tensors, unfinished, {"format": "pt"})
            progress(sum(tensor.nbytes for tensor in tensors.values()))
            write_atomic(own / CONFIG, (json.dumps(self._settings(component), indent=2) + "\n").encode())

    def _settings(self, component: str) -> dict[str, Any]:
        # Whole names: towers, which have no adapters, may have layers of the same last name.
        layers = sorted({name.partition(".lora_")[0] for name in self._trained.names(component)})
        return {
            **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self._base},
            **{"r": self._rank, "lora_alpha": self._rank, "lora_dropout": 0.0, "bias": "none"},
            **{"target_modules": layers, "inference_mode": True},
        }
