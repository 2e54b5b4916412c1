"""Reads the weights of a checkpoint's denoisers, which adapters are added to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import safe_open

from omni_async.config.load import read_model_json


class BaseWeights(Mapping[str, torch.Tensor]):
    """The parameters of a checkpoint's components as `component.name`, by their diffusers names.

    The live parameters are fused, sharded and adapted, so adapters cannot be added to them again. The files are mapped
    once and stay open: a weight is a view of the page cache, without a copy in this process."""

    def __init__(self, path: Path, components: Iterable[str]) -> None:
        self._where: dict[str, tuple[Any, str]] = {}
        for component in components:
            config = read_model_json(path / component / "config.json")
            with torch.device("meta"):  # without memory, for the names that parameters have in diffusers
                model = getattr(diffusers, config["_class_name"]).from_config(config)
            parameters = {name for name, _ in model.named_parameters()}
            for file in sorted((path / component).glob("*.safetensors")):
                opened: Any = safe_open(file, "pt")  # closed when it is collected
                # Files may also contain buffers, which are not trained and so never published.
                for name in parameters & set(opened.keys()):
                    self._where[f"{component}.{name}"] = opened, name

    def __getitem__(self, name: str) -> torch.Tensor:
        file, its_name = self._where[name]
        tensor: torch.Tensor = file.get_tensor(its_name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
