"""Predicts numbers, such as ratings, from the embeddings of a model."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.config.reading import require_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYER = re.compile(r"(?:.*?(\d+)\.)?(weight|bias)")


class Head:
    """A linear layer, or several, in float64. `version`: a digest of them."""

    def __init__(self, tensors: dict[str, Any], where: str, width: int, *, out: int = 1, relu: bool = False) -> None:
        """Take the layers, each a weight (out, in) and a bias (out).

        Args:
            tensors: the weights and biases, with the layers' numbers in their names.
            where: the parameter and the file of the tensors, for errors.
            width: the number of inputs.
            out: the number of outputs.
            relu: whether there is a ReLU between the layers, or nothing.

        Raises:
            ValueError: there are other tensors, or the layers do not lead from `width` numbers to `out`."""
        found: dict[int, dict[str, NDArray[np.float64]]] = {}
        for name, tensor in tensors.items():
            match = _LAYER.fullmatch(name)
            if match is None:
                raise ValueError(f"{where} holds {name!r}, expected the weight and the bias of layers")
            found.setdefault(int(match[1] or 0), {})[match[2]] = tensor.double().numpy()
        layers = [found[number] for number in sorted(found)]
        for layer in layers:
            shape, bias = np.shape(layer.get("weight", 0)), np.shape(layer.get("bias", 0))
            if shape != (*bias, width):
                raise ValueError(f"{where} has a layer of shape {shape} where {width} numbers come in")
            width = len(layer["bias"])
        if width != out or not layers:
            raise ValueError(f"{where} has {len(layers)} layers that end in {width} numbers, expected {out}")
        self._layers = [(layer["weight"], layer["bias"]) for layer in layers]
        self._relu = relu
        content = b"".join(part.tobytes() for layer in self._layers for part in layer)
        self.version = f"head {blake2b(content, digest_size=16).hexdigest()}"

    def __call__(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return the outputs (n, out) for embeddings (n, width)."""
        rows = rows.astype(np.float64)
        for number, (weight, bias) in enumerate(self._layers):
            rows = (np.maximum(rows, 0) if self._relu and number else rows) @ weight.T + bias
        return rows


def read_tensors(file: str) -> dict[str, Any]:
    """Read the tensors of a file of weights (.pth, .pt or .safetensors), by name. OSError if it is not a plain file."""
    require_file(file)
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded
