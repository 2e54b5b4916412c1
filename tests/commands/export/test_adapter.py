"""Tests the files of exported adapters without a run: names for other programs and the scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from omni_async.commands.export.adapter import FILE, OTHER_TOOLS, Adapter


class Trained:
    """Adapters of two layers of one component."""

    components = ("transformer",)

    def __init__(self, *layers: str) -> None:
        self._layers = layers

    def names(self, component: str) -> list[str]:
        return [f"{layer}.lora_{matrix}.weight" for layer in self._layers for matrix in "AB"]

    def read(self, component: str) -> dict[str, torch.Tensor]:
        return {name: torch.full((2, 2), 3.0) for name in self.names(component)}


RENAMED = [(r"blocks\.(\d+)\.to_q", r"double_blocks.\1.q")]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (("blocks.0.to_q", "blocks.7.to_q"), {"double_blocks.0.q", "double_blocks.7.q"}),
        (("blocks.0.to_q", "blocks.0.to_k"), None),  # a file that lacks a layer would be loaded in silence
    ],
)
def test_names_for_comfyui_are_of_all_layers_or_of_none(tmp_path: Path, layers: Any, found: set[str] | None) -> None:
    Adapter(Trained(*layers), 0.5, RENAMED, None).write(tmp_path, lambda nbytes: None)  # type: ignore[arg-type]
    written = load_file(tmp_path / FILE)
    assert {name.rpartition("lora_")[2] for name in written} == {"A.weight", "B.weight"}
    assert {float(one.mean()) for name, one in written.items() if ".lora_B." in name} == {1.5}
    other = tmp_path / OTHER_TOOLS / "transformer.safetensors"
    assert other.exists() == (found is not None)
    assert found is None or {name.partition(".lora_")[0] for name in load_file(other)} == found
