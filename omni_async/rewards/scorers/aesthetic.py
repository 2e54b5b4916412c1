"""Scores how much an image is liked, whatever its prompt: LAION's aesthetic predictors on CLIP's image embeddings.

A predictor is a linear layer, or several without a nonlinearity between them (the "improved" predictor of C. Schuhmann,
sac+logos+ava1-l14-linearMSE; its dropout matters only in training). Either way

    value = W_n ( ... (W_1 e + b_1) ... ) + b_n,    e the embedding, divided by its norm

on about the scale of the ratings it was trained on, 1 to 10. It is meaningful only for the embeddings that it was
trained on; the published predictors were trained on embeddings of OpenAI's ViT-L/14.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.config.reading import require_file
from omni_async.rewards.scorers.clip import Clip, frames_of, missing_clip
from omni_async.rewards.scorers.pretrained import Precision, folder_of, missing_file, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media

_LAYER = re.compile(r"(?:.*?(\d+)\.)?(weight|bias)")


class AestheticScorer:
    """A scorer of images; for a video, the mean over `frames` frames.

    `path`: a CLIP checkpoint in transformers' layout. `head`: the predictor's file (.pth, .pt or .safetensors). The
    other parameters are as in `PromptAlignmentScorer`."""

    name = "aesthetic"
    accepts = ("image", "video")
    cost = "model"
    deterministic = True

    def __init__(
        self,
        *,
        path: str,
        head: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Annotated[int, Meta(ge=1)] = 4,
        batch: Annotated[int, Meta(ge=1)] = 32,
        device: str,
    ) -> None:
        self._frames = frames
        self._clip = Clip(path, processor, device, dtype, batch)
        file = str(folder_of(head))
        self._layers = read_head(read_tensors(file), f"head: {file}", self._clip.width)
        layers = b"".join(part.tobytes() for layer in self._layers for part in layer)
        self.version = f"{self._clip.version}, head {blake2b(layers, digest_size=16).hexdigest()}"

    @staticmethod
    def check_params(params: dict[str, Any]) -> str | None:
        """Require the checkpoint's files and the predictor's."""
        return missing_clip(params) or missing_file("head", params["head"])

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        frames = [frames_of(one, self._frames) for one in media]
        rows = self._clip.images([frame for some in frames for frame in some]).astype(np.float64)
        for weight, bias in self._layers:
            rows = rows @ weight.T + bias
        return [Score(float(values.mean())) for values in per_sample(rows[:, 0], frames)]


def read_head(
    tensors: dict[str, Any], where: str, width: int, out: int = 1
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return a predictor's layers, each a weight (out, in) and a bias (out), first to last.

    Args:
        tensors: the weights and biases, with the layers' numbers in their names.
        where: the parameter and the file of the tensors, for errors.
        width: the number of inputs.
        out: the number of outputs.

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
        if (shape := getattr(layer.get("weight"), "shape", ())) != (*getattr(layer.get("bias"), "shape", ()), width):
            raise ValueError(f"{where} has a layer of shape {shape} where {width} numbers come in")
        width = len(layer["bias"])
    if width != out or not layers:
        raise ValueError(f"{where} has {len(layers)} layers that end in {width} numbers, expected {out}")
    return [(layer["weight"], layer["bias"]) for layer in layers]


def read_tensors(file: str) -> dict[str, Any]:
    """Read the tensors of a file of weights (.pth, .pt or .safetensors), by name. OSError if it is not a plain file."""
    require_file(file)
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded
