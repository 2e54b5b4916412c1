"""Loads the models of scorers from folders in transformers' layout, onto the device of the reward worker.

Nothing is downloaded. A checkpoint that lacks weights of its model is refused: transformers would initialise them at
random and only log it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import xxhash

from omni_async.config.decoding import decode_json
from omni_async.config.hub import downloaded, how_to_get
from omni_async.config.load import LARGEST_JSON
from omni_async.config.reading import read_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

Precision = Literal["float32", "bfloat16", "float16"]

_CONFIG = "config.json"
_LARGEST_PREPARED = 2**28  # bytes of a vocabulary, as of a trained model
_PROCESSOR_FILES = (".json", ".txt", ".model", ".jinja")  # of tokenizers, image processors and feature extractors


def folder_of(path: str) -> Path:
    """Return the folder `path`, or its folder in the hub's cache if `path` is the `owner/name` of a checkpoint."""
    folder = Path(path).expanduser()
    return folder if folder.exists() else downloaded(path) or folder


def wrong_checkpoint(path: str, model_type: str) -> str | None:
    """Return why `path` is not a checkpoint of transformers' `model_type` by its config.json; None if it is."""
    folder = folder_of(path)
    if not folder.exists():
        return f"path: {how_to_get(folder)}"
    try:
        found = decode_json(read_file(folder / _CONFIG, LARGEST_JSON))["model_type"]
    except FileNotFoundError:
        return f"path: {folder} is not a checkpoint in transformers layout: it has no {_CONFIG}"
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
        return f"path: {folder / _CONFIG} names no model_type ({type(error).__name__}: {error})"
    return None if found == model_type else f"path: {folder} is a {found!r} checkpoint, expected {model_type!r}"


def missing_file(name: str, path: str) -> str | None:
    """Return an error if the file or folder does not exist, else None; `name` is the parameter that names it."""
    return None if folder_of(path).exists() else f"{name}: there is no {folder_of(path)}"


def load_part(kind: Any, folder: Path, **settings: Any) -> Any:
    """Load a tokenizer or a processor, of this class of transformers."""
    return kind.from_pretrained(folder, local_files_only=True, **settings)


def load_model(model: Any, path: str, config: Any = None, tensors: dict[str, Any] | None = None) -> Any:
    """Load a checkpoint on the CPU in float32, without gradients.

    Args:
        model: transformers' class.
        path: the checkpoint's folder, or its name in the hub's cache.
        config: replaces the one in the folder.
        tensors: replace the weights in the folder, by their names; they require `config`.

    Raises:
        ValueError: the checkpoint lacks some of the model's weights."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would appear among the run's own lines
    given = {} if config is None else {"config": config}
    folder = folder_of(path) if tensors is None else None
    loaded, found = model.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, state_dict=tensors, **given
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{path}: {len(missing)} weights of {model.__name__} are not there, {missing[0]} for one")
    return loaded.eval().requires_grad_(False)


def version_of(model: Any, prepared: Path, device: str) -> str:
    """Return everything that the answers of a loaded model depend on, for a scorer's `version`.

    Args:
        model: on the CPU; its weights and its configuration count.
        prepared: the folder with the tokenizer and the processor; the content of their files counts.
        device: its future device; only the device's kind counts."""
    import PIL
    import torch
    import transformers

    found = xxhash.xxh3_128(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().reshape(-1).numpy().data)
    for file in sorted(prepared.iterdir()):
        if file.suffix in _PROCESSOR_FILES:
            found.update(os.fsencode(file.name) + b";" + read_file(file, _LARGEST_PREPARED))
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}, pillow {PIL.__version__}"
    return f"{found.hexdigest()}, {torch.device(device).type}, {libraries}"


def unit(features: Any) -> NDArray[np.float32]:
    """Return the rows of a tensor (n, width), each divided by its norm, as float32 on the CPU."""
    exact = features.float()
    rows: NDArray[np.float32] = (exact / exact.norm(dim=-1, keepdim=True)).cpu().numpy()
    return rows


def in_batches(batch: int, read: Callable[..., NDArray[Any]], *columns: Sequence[Any]) -> NDArray[Any]:
    """Return the rows of `read` for all items of the columns, of which each call gets at most `batch`, in lists."""
    starts = range(0, len(columns[0]), batch)
    return np.concatenate([read(*([*items[i : i + batch]] for items in columns)) for i in starts])


def embedded_texts(texts: Sequence[str], batch: int, embed: Callable[[list[str]], Any]) -> NDArray[np.float32]:
    """Return the embeddings of texts, each of norm 1: float32 (texts, width).

    `embed` returns the embeddings of at most `batch` texts, a tensor; it gets a repeated text once."""
    distinct = list(dict.fromkeys(texts))
    rows = in_batches(batch, lambda some: unit(embed(some)), distinct)
    return rows[[distinct.index(text) for text in texts]]


def per_sample(values: NDArray[Any], looked_at: Sequence[Sequence[Any]]) -> list[NDArray[Any]]:
    """Split rows, one for each scored image or window, into the rows of each sample."""
    return np.split(values, np.cumsum([len(some) for some in looked_at])[:-1])
