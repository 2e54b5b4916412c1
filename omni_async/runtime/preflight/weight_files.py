"""Checks that the weights and vocabularies of a checkpoint's part are complete, and have the names that libraries load.

diffusers and transformers look for one file, or for an index of shards, of one fixed name. A variant (`fp16`), shards
without an index and pickles are never loaded. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from omni_async.config import ConfigError
from omni_async.config.load import LFS_POINTER, read_model_json
from omni_async.config.reading import open_file, read_file
from omni_async.config.tensor_files import read_header

# The names of weights, by the library that loads a part.
_STEMS = {"diffusers": ("diffusion_pytorch_model",), "transformers": ("model",)}
_ANY_STEM = ("diffusion_pytorch_model", "model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
# A tokenizer is loaded from the first of these sets of files that is complete.
_VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("tokenizer.model",),
    ("sentencepiece.bpe.model",),
    ("vocab.txt",),
)
_LARGEST_VOCABULARY = 2**28
_WITHOUT_VOCABULARY = "ByT5"  # its tokens are bytes


def check_weights(part: Path, library: str) -> None:
    """Check the weights that `library` loads from the folder `part`.

    ConfigError, one line, if files are missing, damaged, or have other names."""
    stems = _STEMS.get(library, _ANY_STEM)
    for stem in stems:
        index, alone = part / f"{stem}.safetensors.index.json", part / f"{stem}.safetensors"
        # If both exist, transformers loads the single file, diffusers the shards of the index.
        if index.is_file() and not (library == "transformers" and alone.is_file()):
            return _check_shards(index)
        if alone.is_file():
            # vLLM-Omni reads every safetensors file of a folder without an index.
            for file in sorted(file for file in part.glob("*.safetensors") if file.is_file()):
                _tensors_of(file)
            return None
    raise ConfigError(f"model.path: {part} {_instead(part, stems[0])}")


def tensor_shapes(part: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a denoiser in the folder `part`, which `check_weights` has accepted."""
    (stem,) = _STEMS["diffusers"]
    index, files = part / f"{stem}.safetensors.index.json", [f"{stem}.safetensors"]
    if index.is_file():
        files = sorted(set(read_model_json(index)["weight_map"].values()))
    return {name: shape for file in files for name, shape in _tensors_of(part / file).items()}


def check_vocabulary(part: Path, cls: str) -> None:
    """Check the vocabulary files of the tokenizer or processor `cls` in the folder `part`. Raises ConfigError."""
    if cls.startswith(_WITHOUT_VOCABULARY):
        return
    for names in _VOCABULARIES:
        if all((part / name).is_file() for name in names):
            for name in names:
                _check_vocabulary_file(part / name)
            return
    expected = ", or ".join(" and ".join(names) for names in _VOCABULARIES[:3])
    raise ConfigError(f"model.path: {part} has no vocabulary; expected {expected}; copy it again")


def _check_vocabulary_file(file: Path) -> None:
    try:
        content = read_file(file, _LARGEST_VOCABULARY)
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror or error}") from None
    if content.startswith(LFS_POINTER):
        raise ConfigError(f"model.path: {file} {_POINTER}")
    if not content.strip():
        raise ConfigError(f"model.path: {file} is empty; copy it again")
    if file.suffix == ".json":
        try:
            msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"model.path: {file} is cut off or no JSON ({error}); copy it again") from None


def _check_shards(index: Path) -> None:
    """Check that every shard of an index exists, is complete, and contains the tensors that the index lists."""
    where = read_model_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ConfigError(f"model.path: {index}: expected a weight_map, tensors to files; copy it again")
    expected: dict[str, set[str]] = {}
    for tensor, file in where.items():
        expected.setdefault(file, set()).add(tensor)
    if outside := next((file for file in expected if Path(file).name != file), None):
        raise ConfigError(f"model.path: {index}: expected names of files in its own folder, got {outside[:200]!r}")
    part = index.parent
    if missing := sorted(file for file in expected if not (part / file).is_file()):
        raise ConfigError(f"model.path: {part} lacks {len(missing)} of {len(expected)} files of weights: {missing[0]}")
    for file, tensors in sorted(expected.items()):
        if absent := tensors - _tensors_of(part / file).keys():
            raise ConfigError(
                f"model.path: {part / file} lacks the tensor {min(absent)!r}, which {index.name} lists there; copy both"
                " again"
            )


def _instead(part: Path, stem: str) -> str:
    """Return the files that a folder without loadable weights has instead, and a remedy."""
    wanted = f"{stem}.safetensors"
    lacks = f"has no weights ({wanted}, or {wanted}.index.json and its shards)"
    indices = sorted(file.name for file in part.glob("*.safetensors.index*.json"))
    files = sorted(file.name for file in part.glob("*.safetensors") if file.is_file())
    for name in indices:
        kind = _variant(name.removesuffix(".json"), ".safetensors.index")
        which = f"the {kind} variant" if kind else "another name"
        return f"{lacks}, but only {which} in shards; rename {name} to {wanted}.index.json (shards keep their names)"
    shards = [name for name in files if _SHARD.search(name)]
    if shards:
        return f"{lacks}, but {len(shards)} shards without an index ({shards[0]}); copy {wanted}.index.json too"
    for name in files:
        kind = _variant(name, ".safetensors")
        which = f"only the {kind} variant" if kind else "only another name"
        return f"{lacks}, but {which}, {name}; rename it to {wanted}"
    pickles = [path.name for pattern in _PICKLES for path in sorted(part.glob(pattern))]
    if pickles:
        return (
            f"{lacks}; {part / pickles[0]} is a pickle, which may run code when it is read; convert it to safetensors"
        )
    return f"{lacks}; copy it again"


def _variant(name: str, ending: str) -> str:
    """Return the variant in a name, as in `model.fp16.safetensors`, or an empty text."""
    stem, _, after = name.partition(ending)
    return (after or stem.partition(".")[2]).strip(".")


_POINTER = "is a Git LFS pointer and not the file; fetch it with `git lfs pull`"


def _tensors_of(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors. ConfigError if its length differs from its header's."""
    try:
        with open_file(file) as opened:
            size = file.stat().st_size
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConfigError(f"model.path: {file} {_POINTER}")
            opened.seek(0)
            header = read_header(opened, size)
    except OSError as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error.strerror or error}") from None
    except ConfigError:
        raise
    except ValueError:
        why = f"({size} bytes) is cut off or no safetensors file; copy it again"
        raise ConfigError(f"model.path: {file} {why}") from None
    if size != header.end:
        raise ConfigError(f"model.path: {file} has {size} bytes, expected from its header {header.end}; copy it again")
    _require_opened(file)
    return {name: tensor.shape for name, tensor in header.tensors.items()}


def _require_opened(file: Path) -> None:
    """Open a file as the loader does, which checks every tensor's type, shape and offset."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path: {file} is no safetensors file: {error}; copy it again") from None
