"""Computes digests of files, so that they are compared by content and never by path. Imports no torch.

A model's digest covers its tensors by name, dtype, shape and values, regardless of the files that hold them, and its
other files. For a tensor of more than a mebibyte it covers five pieces of 64 KiB, so a digest takes seconds whatever
the model's size. The trainer compares every byte of the components that it loads (`TrainEngine.digest0`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from omni_async.config import Config, ConfigError
from omni_async.config.load import INDEX, LARGEST_JSON, checkpoint_class, read_model_index
from omni_async.config.reading import open_file
from omni_async.config.tensor_files import read_header
from omni_async.config.tree import file_of, path_params
from omni_async.types import Prompt

MODEL = "model.path/"  # before the name of each part of the base model
_WHOLE = 2**20  # bytes; a tensor, or a file without tensors, is digested entirely up to this size
_PIECE = 2**16
_PIECES = 5
_SHARD = re.compile(r"(diffusion_pytorch_model|model)(-\d+-of-\d+)?\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf")
# Keys that a library writes into a configuration when it saves a model; they do not change what the model computes.
_NOTES = ("_name_or_path", "_diffusers_version", "transformers_version", "_commit_hash")


def contents_of(config: Config, prompts: Sequence[Prompt], validation: Sequence[Prompt]) -> dict[str, str]:
    """Return the digest of every file that the configuration names by a path, by the key that names it.

    Args:
        config: a checked configuration.
        prompts: the content of `data.prompts` or `data.preferences`.
        validation: the content of `validation.prompts`.

    Raises:
        ConfigError: a file cannot be read; one line."""
    found: dict[str, str] = {}
    if config.emulation is not None:  # a model, prompts and scorers need not exist
        profile = config.emulation.profile  # a file, or the name of a shipped profile
        return path_contents("emulation.profile", profile) if profile.endswith(".json") else found
    found |= model_contents(Path(config.model.path))
    if (teacher := config.algorithm.teacher) is not None:
        key = "algorithm.teacher.path"
        found[key] = _hashed(model_contents(Path(teacher.path)))
    if config.data.preferences is not None:
        pairs = path_contents("data.preferences", config.data.preferences)
        found["data.preferences"] = _of_prompts(prompts) + pairs.get("data.preferences", "")
    else:
        found["data.prompts"] = _of_prompts(prompts)
    if config.validation is not None:
        found["validation.prompts"] = _of_prompts(validation)
    if (program := config.rollout.program) is not None:
        found |= _settings_contents("rollout.program.settings", program.settings)
    return found | reward_contents(config)


def reward_contents(config: Config) -> dict[str, str]:
    """Return the digests of the models that scorers and judges load. Raises ConfigError, one line."""
    found: dict[str, str] = {}
    for number, scorer in enumerate(config.reward.scorers):
        found |= _scorer_contents(f"reward.scorers.{number}", scorer.name, scorer.params)
    for number, server in enumerate(config.reward.servers):
        if server.replicas:
            found |= path_contents(f"reward.servers.{number}.model", server.model)
    return found


def _scorer_contents(key: str, scorer: str, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that a scorer's parameters name. `key`: the scorer's key in the recipe."""
    found = {} if (file := file_of(scorer)) is None else path_contents(f"{key}.file", file)
    foreign = ":" in scorer  # only the scorer knows which of its parameters are paths
    for name in [*params] if foreign else path_params(scorer):
        value = params.get(name)
        if isinstance(value, str) and (not foreign or _is_plain_file(value)):
            found |= path_contents(f"{key}.params.{name}", value)
    return found


def _settings_contents(key: str, value: Any) -> dict[str, str]:
    """Return the digests of files that a program's settings name, its judge's model included."""
    if isinstance(value, str):
        return path_contents(key, value) if _is_plain_file(value) else {}
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    if isinstance(value.get("name"), str) and isinstance(value.get("params"), dict):
        return _scorer_contents(key, value["name"], value["params"])
    return {
        found: one for name, item in value.items() for found, one in _settings_contents(f"{key}.{name}", item).items()
    }


def _is_plain_file(text: str) -> bool:
    """Return whether a text names a readable file. A folder does not count: a scorer may write into it."""
    try:
        return text.startswith("/") and Path(text).is_file() and os.access(text, os.R_OK)
    except (OSError, ValueError):
        return False


def model_contents(folder: Path) -> dict[str, str]:
    """Return the digest of every part of a model in diffusers layout, as `model.path/<part>`, and that of its index.

    A model in transformers layout is one part. Raises ConfigError, one line, if the model is missing or cannot be
    read."""
    if checkpoint_class(folder)[0] == "transformers":
        return path_contents(f"{MODEL}.", folder)
    index = read_model_index(folder)
    parts = {name: entry for name, entry in index.items() if isinstance(entry, list) and (folder / name).is_dir()}
    found = {f"{MODEL}{INDEX}": _hashed(_without_notes(index))}
    for part in sorted(parts):
        found |= path_contents(f"{MODEL}{part}", folder / part)
    return found


def another_part(stated: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Return the first part of a base model that differs from the stated one; None if all are the same."""
    changed = (key for key in sorted(stated) if key.startswith(MODEL) and found.get(key) != stated[key])
    return next((key.removeprefix(MODEL) for key in changed), None)


def path_contents(key: str, path: str | Path) -> dict[str, str]:
    """Return the digest of a file or a folder under its key; an empty dict if neither exists.

    Raises ConfigError, one line that begins with the key, if it cannot be read."""
    path = Path(path)
    try:
        if not path.exists():
            return {}
        files = _files_of(path)
        return {key: _digest(path, tuple((file, *_stamp(file)) for file in files))}
    except ValueError as error:  # not a path
        raise ConfigError(f"{key}: {str(path)[:200]!r} cannot be read: {error}") from None
    except OSError as error:
        where = error.filename or path
        raise ConfigError(f"{key}: {where} cannot be read: {error.strerror or error}") from None


def _stamp(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _files_of(path: Path) -> list[Path]:
    """Return the files that determine what a folder computes: no notes for readers, no duplicate weights."""
    if path.is_file():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    in_use = {file.parent for file in found if _SHARD.fullmatch(file.name)}
    return [file for file in found if _counts(file, file.parent in in_use)]


def _counts(file: Path, has_weights: bool) -> bool:
    """Return whether a file counts. `has_weights`: its folder has safetensors files that a library loads."""
    name = file.name.lower()
    if name.endswith((".md", ".index.json")) or name.startswith("license"):
        return False
    if has_weights and name.endswith((".safetensors", *_PICKLES)):
        return _SHARD.fullmatch(file.name) is not None
    return True


@lru_cache(maxsize=256)
def _digest(path: Path, stamps: tuple[tuple[Any, ...], ...]) -> str:
    """Return the digest of files below `path`, cached until their stamps change."""
    lines: list[str] = []
    for file, *_ in stamps:
        name = "" if file == path else str(file.relative_to(path))
        lines += _lines_of(file, name)
    return _hashed(sorted(lines))


def _lines_of(file: Path, name: str) -> Iterator[str]:
    """Yield a file's content as digests: a line per tensor, or one line for the file."""
    with open_file(file) as opened:
        size = file.stat().st_size
        if file.suffix == ".safetensors" and (tensors := _tensors(opened, size)) is not None:
            folder = name.rpartition("/")[0]
            for tensor, (dtype, shape, start, end) in tensors.items():
                yield f"{folder} {tensor!r} {dtype} {shape} {_sampled(opened, start, end)}"
        elif file.suffix == ".json" and size <= LARGEST_JSON:
            opened.seek(0)
            yield f"{name} {_hashed(_json_of(opened.read()))}"
        else:
            yield f"{name} {size} {_sampled(opened, 0, size)}"


def _tensors(file: BinaryIO, size: int) -> dict[str, tuple[str, list[int], int, int]] | None:
    """Return dtype, shape, begin and end of every tensor of a safetensors file; None if it is not one."""
    try:
        header = read_header(file, size)
    except ValueError:
        return None
    found = {}
    for name, one in header.tensors.items():
        start, end = (header.begin + offset for offset in one.data_offsets)
        if not start <= end <= size:
            return None
        found[name] = (one.dtype, [*one.shape], start, end)
    return found


def _sampled(file: BinaryIO, start: int, end: int) -> str:
    """Return the digest of bytes `start` to `end`; of a long range, of some pieces, first and last included."""
    found = xxhash.xxh3_128(str(end - start).encode())
    pieces = [(start, end - start)]
    if end - start > _WHOLE:
        last = end - start - _PIECE
        pieces = [(start + math.floor(last * piece / (_PIECES - 1)), _PIECE) for piece in range(_PIECES)]
    for offset, size in pieces:
        file.seek(offset)
        found.update(file.read(size))
    return found.hexdigest()


def _json_of(content: bytes) -> Any:
    try:
        value = _without_notes(json.loads(content))
        _hashed(value)  # fails on a lone surrogate
    except (ValueError, OverflowError, RecursionError):
        return content.hex()
    return value


def _without_notes(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_notes(item) for key, item in value.items() if key not in _NOTES}


def _of_prompts(prompts: Sequence[Prompt]) -> str:
    return _hashed([[one.index, *one.content] for one in prompts])


def _hashed(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value, order="deterministic"))
