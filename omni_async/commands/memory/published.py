"""Finds the configuration of a recipe's model: its checkpoint's, or a published model's.

A family's package has a folder `published` next to its policy, with a folder for each published model: only the JSON
files of the checkpoint. Imports no torch.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from omni_async.config import Config, ConfigError
from omni_async.config.load import family_of
from omni_async.plugins.families import PipelineFamily, find_family

_FOLDER = "published"


def find_model(config: Config) -> tuple[PipelineFamily, Path, str]:
    """Return a recipe's family, the folder of its model's configuration files, and a sentence on their source.

    ConfigError if there is neither a checkpoint at `model.path` nor a published model of its folder's name."""
    path = Path(config.model.path)
    try:
        family = find_family(config.model.pipeline or family_of(path))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if (path / "model_index.json").is_file():
        return family, path, f"configuration of {path}"
    known = published_models(family)
    if path.name not in known:
        raise ConfigError(
            f"model.path: {path} has no model_index.json, and {path.name!r} is no published model of"
            f" {family.name}; expected one of {', '.join(known) or 'none'}; name a folder so, or copy the checkpoint's"
            " JSON files there"
        )
    return family, known[path.name], f"no checkpoint at {path}: configuration of the published {path.name}"


def published_models(family: PipelineFamily) -> dict[str, Path]:
    """Return the folders with the configuration of a family's published models, by name."""
    package = family.policy.partition(":")[0].rpartition(".")[0]
    if not package:  # a module outside packages has no folder next to it
        return {}
    folder = Path(str(files(package))) / _FOLDER
    return {path.name: path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
