"""Finds what is missing or cut off in a checkpoint folder, from its small files and the headers of the large ones.

Imports no torch.

A folder in diffusers layout lists its parts in model_index.json; each is a folder with a configuration, and with
weights where it is a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_async.config import ConfigError
from omni_async.config.load import INDEX, LARGEST_JSON, read_model_index, read_model_json
from omni_async.families import PipelineFamily, SamplingSpec

_DEGREE = "trainer.sequence_parallel"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_LFS_POINTER = b"version https://git-lfs"


def check_checkpoint(folder: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Check that `folder` holds a whole checkpoint of the family, which makes samples of the specs.

    Args:
        folder: `model.path`.
        family: what the checkpoint has to be.
        specs: each under the recipe's key that it stands at.

    Raises:
        ConfigError: it does not; one line, naming the file or the key."""
    index, listed = folder / INDEX, read_model_index(folder)
    found = listed.get("_class_name")
    if found != family.model_index_class:
        raise ConfigError(
            f"model.path: {folder} is a {found} checkpoint, but model.pipeline {family.name!r} needs a"
            f" {family.model_index_class}"
        )
    parts = _parts(listed)
    if not parts:
        raise ConfigError(f"model.path: {index} lists no parts")
    if (needed := family.components[0]) not in parts:
        raise ConfigError(f"model.path: {index} lists no {needed}")
    for name, cls in parts.items():
        _check_part(folder, name, cls)
    for key, spec in specs.items():
        try:
            problem = spec.problem(folder)
        except OSError as error:
            raise ConfigError(f"model.path: {error.filename} cannot be read: {error.strerror}") from None
        except ValueError as error:  # a part that the index does not list has no configuration
            raise ConfigError(str(error)) from None
        if problem:
            raise ConfigError(f"{key}.{problem}")


def check_sequence(degree: int, folder: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Check that `degree` ranks can share the checkpoint's attention heads and the tokens of the specs.

    Args:
        degree: `trainer.sequence_parallel`; 1 is always right.
        folder, family, specs: as `check_checkpoint` has accepted them.

    Raises:
        ConfigError: they cannot; one line."""
    if degree == 1:
        return
    if family.attention_heads is None:
        raise ConfigError(f"{_DEGREE}: ranks cannot share the tokens of a {family.name!r} sample, got {degree}; use 1")
    for component in family.components:
        if not (file := folder / component / "config.json").is_file():
            continue  # a checkpoint may go without, as Wan2.2 TI2V does without a second expert
        heads = json.loads(file.read_bytes()).get(family.attention_heads)
        if not isinstance(heads, int) or heads < 1:
            raise ConfigError(f"model.path: {file} does not say its {family.attention_heads}, got {heads!r}")
        if heads % degree:
            raise ConfigError(
                f"{_DEGREE}: {degree} ranks share a sequence, and do not divide the {heads} attention heads of"
                f" {folder / component}; use a divisor"
            )
    for key, spec in specs.items():
        tokens = spec.shared_tokens(folder)
        if tokens is not None and tokens % degree:
            raise ConfigError(
                f"{key}: a sample's tokens are a multiple of {tokens}, which {_DEGREE} = {degree} does not divide; use"
                " another size or another degree"
            )


def _parts(listed: dict[str, Any]) -> dict[str, str]:
    """Return the class of each part by its folder. What a checkpoint goes without is listed as null."""
    entries = {name: entry for name, entry in listed.items() if isinstance(entry, list) and len(entry) == 2}
    return {Path(name).name: str(cls) for name, (_, cls) in sorted(entries.items()) if cls is not None}


def _check_part(folder: Path, name: str, cls: str) -> None:
    part = folder / name
    if not part.is_dir():
        raise ConfigError(f"model.path: {folder} has no {name}/, but its model_index.json lists {cls} there")
    settings = {file.name: file for file in sorted(part.glob("*config.json"))}
    weights = [file for pattern in ("*.safetensors", *_PICKLES) for file in sorted(part.glob(pattern))]
    if not settings or (weights and "config.json" not in settings):
        needed = "config.json" if weights else "*config.json"  # what is no model has a name of its kind before it
        raise ConfigError(f"model.path: {part} has no {needed}, but {folder}/model_index.json lists {cls} there")
    for file in settings.values():
        read_model_json(file)
    if "config.json" in settings and not any(word in cls for word in ("Tokenizer", "Processor", "Extractor")):
        _check_weights(part)


def _check_weights(part: Path) -> None:
    files = [file for file in sorted(part.glob("*.safetensors")) if file.is_file()]
    wanted: set[str] = set()
    for index in sorted(part.glob("*.safetensors.index.json")):
        shards = read_model_json(index).get("weight_map")
        wanted |= {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()
    if missing := sorted(wanted - {file.name for file in files}):
        raise ConfigError(f"model.path: {part} lacks {len(missing)} of {len(wanted)} files of weights: {missing[0]}")
    if not files:
        pickled = [path for pattern in _PICKLES for path in sorted(part.glob(pattern))]
        raise ConfigError(
            f"model.path: {pickled[0]} is a pickle, which may run code when it is read; convert it to safetensors"
            if pickled
            else f"model.path: {part} has no weights (*.safetensors)"
        )
    for file in files:
        if problem := _wrong_with(file):
            raise ConfigError(f"model.path: {file} {problem}")


def _wrong_with(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, which should be as long as its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "is a Git LFS pointer and not the file; fetch it with `git lfs pull`"
            opened.seek(0)
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = opened.read(length) if length <= LARGEST_JSON else b""
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"({size} bytes) is cut off or no safetensors file; copy it again"
    return None if size == expected else f"has {size} bytes, its header says {expected}; copy it again"
