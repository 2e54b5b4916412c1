"""Finds missing and damaged files in a checkpoint folder, as needed by its family.

Reads small files and the headers of large ones (`weight_files`).

Imports no torch.

A folder in diffusers layout lists its parts in model_index.json. Each part is a folder with a configuration; models
also have weights. A folder in transformers layout has one configuration, all weights and a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_async.config import ConfigError
from omni_async.config.load import INDEX, checkpoint_class, read_model_index, read_model_json
from omni_async.config.section import size_text
from omni_async.plugins.families import PipelineFamily, SamplingSpec
from omni_async.runtime.preflight.weight_files import check_vocabulary, check_weights, tensor_shapes

_LARGE_MODEL = 4 * 10**9  # bytes; a digest of fewer takes a few seconds at most
_DEGREE = "trainer.sequence_parallel"
_LIBRARIES = ("diffusers", "transformers")
_NO_MODELS = ("Tokenizer", "Processor", "Extractor", "Scheduler", "Guid")  # in the names of classes without weights


def check_checkpoint(folder: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Check that `folder` contains a complete checkpoint of the family, which generates samples of the specs.

    Args:
        folder: `model.path`.
        family: the required family of the checkpoint.
        specs: sampling specs by their key in the recipe.

    Raises:
        ConfigError: the checkpoint is incomplete; one line, naming the file or the key."""
    layout, found = checkpoint_class(folder)
    if (layout, found) != (family.layout, family.model_index_class):
        raise ConfigError(
            f"model.path: {folder} is a {found} checkpoint, but model.pipeline {family.name!r} needs a"
            f" {family.model_index_class}"
        )
    try:
        if layout == "transformers":
            check_weights(folder, layout)
            check_vocabulary(folder, "Tokenizer")
        else:
            _check_parts(folder, family)
        problems = [(key, problem) for key, spec in specs.items() if (problem := spec.problem(folder))]
    except OSError as error:
        raise ConfigError(f"model.path: {error.filename} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:  # a part that the index does not list has no configuration
        raise ConfigError(str(error)) from None
    if problems:
        raise ConfigError(".".join(problems[0]))


def _check_parts(folder: Path, family: PipelineFamily) -> None:
    """Check the parts of a checkpoint in diffusers layout."""
    index, parts = folder / INDEX, _parts(read_model_index(folder))
    if not parts:
        raise ConfigError(f"model.path: {index} lists no parts")
    if (needed := family.components[0]) not in parts:
        raise ConfigError(f"model.path: {index} lists no {needed}")
    for name, (library, cls) in parts.items():
        _check_part(folder, name, library, cls)


def check_teacher(folder: Path, model: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Check that `folder` contains a complete checkpoint, whose components have the tensors of the model's.

    Args:
        folder: `algorithm.teacher.path`.
        model: `model.path`, as `check_checkpoint` has accepted it.
        family, specs: as in `check_checkpoint`.

    Raises:
        ConfigError: they differ, or the checkpoint is incomplete; one line, naming the first difference."""
    try:
        if family.layout != "diffusers":
            raise ConfigError(f"a {family.name!r} model has no teacher; remove algorithm.teacher")
        check_checkpoint(folder, family, specs)
        for component in family.components:
            if not (model / component).is_dir():
                continue  # a checkpoint may omit a component
            own, others = tensor_shapes(model / component), tensor_shapes(folder / component)
            for name in sorted(own.keys() | others.keys()):
                if own.get(name) != others.get(name):
                    shapes = [str(found.get(name, "no such tensor")) for found in (others, own)]
                    raise ConfigError(
                        f"model.path: {folder / component}: {name}: {shapes[0]}, but {shapes[1]} in model.path; a"
                        " teacher has the architecture of the model that is trained"
                    )
    except ConfigError as error:
        raise ConfigError(f"algorithm.teacher.path: {str(error).removeprefix('model.path: ')}") from None


def check_sequence(degree: int, folder: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Check that `degree` ranks can share the checkpoint's attention heads and the tokens of the specs.

    Args:
        degree: `trainer.sequence_parallel`; 1 is always right.
        folder, family, specs: as `check_checkpoint` has accepted them.

    Raises:
        ConfigError: they cannot; one line."""
    if degree == 1:
        return
    if family.attention_heads is None or family.layout != "diffusers":
        raise ConfigError(f"{_DEGREE}: ranks cannot share the tokens of a {family.name!r} sample, got {degree}; use 1")
    for component in family.components:
        if not (file := folder / component / "config.json").is_file():
            continue  # a checkpoint may omit a component, as Wan2.2 TI2V has no second expert
        heads = read_model_json(file).get(family.attention_heads)
        if not isinstance(heads, int) or heads < 1:
            raise ConfigError(f"model.path: {file} does not name its {family.attention_heads}, got {heads!r}")
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


def _parts(listed: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the library and the class of each part by its folder. An absent part is listed as null."""
    entries = {name: entry for name, entry in listed.items() if isinstance(entry, list) and len(entry) == 2}
    return {
        Path(name).name: (str(library), str(cls)) for name, (library, cls) in sorted(entries.items()) if cls is not None
    }


def _check_part(folder: Path, name: str, library: str, cls: str) -> None:
    part, listed = folder / name, f"but its model_index.json lists {cls} there"
    if not part.is_dir():
        problem = "is a file, not a folder" if part.exists() else None
        raise ConfigError(
            f"model.path: {part} {problem}, {listed}" if problem else f"model.path: {folder} has no {name}/, {listed}"
        )
    settings = {file.name: file for file in sorted(part.glob("*config.json"))}
    is_model = library in _LIBRARIES and not any(word in cls for word in _NO_MODELS)
    needed = "config.json" if is_model else "scheduler_config.json" if "Scheduler" in cls else None
    if not settings or (needed is not None and needed not in settings):
        raise ConfigError(
            f"model.path: {part} has no {needed or '*config.json'}, but {folder}/model_index.json lists {cls} there"
        )
    found = {file_name: read_model_json(file) for file_name, file in settings.items()}
    if is_model or ("config.json" in settings and not any(word in cls for word in _NO_MODELS)):
        named = found["config.json"].get("_class_name", cls)
        if library == "diffusers" and named != cls:
            raise ConfigError(f"model.path: {part}/config.json is of a {named}, {listed}")
        check_weights(part, library)
    elif "Tokenizer" in cls or ("Processor" in cls and "ImageProcessor" not in cls):
        check_vocabulary(part, cls)


def announce_digest(folder: Path, announce: Callable[[str], None]) -> None:
    """Announce the digest of a large checkpoint in `folder`, which takes some seconds."""
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors") if file.exists())
    if size >= _LARGE_MODEL:
        announce(f"computing the digest of {size_text(size)} of weights in {folder.name}")
