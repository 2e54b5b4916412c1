"""Loads a recipe: read, decode, resolve, check.

Every mistake is one `ConfigError` that names the key and what it allows. A value passes four steps, once each:

    read     tree.py      the file, the files it extends, overrides, absolute paths      -> plain data
    decode   decode.py    the schema: keys, types, bounds                                -> `Config`
    resolve  load.py      sections whose keys other packages define, and the schedule    -> `Config`
    check    checks.py    combinations                                                   -> the same `Config`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.config.checks import check
from omni_async.config.decode import decode
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.redact import redact, shown
from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.config.schema import Config, Role
from omni_async.config.section import Section
from omni_async.config.tree import errors_of, read_tree
from omni_async.config.yaml_text import ConfigError, to_yaml
from omni_async.entry_points import find_registered, registered_names
from omni_async.families import family_names, find_family
from omni_async.services import find_service

OBJECTIVES = "omni_async.objectives"
_LARGEST_INDEX = 10_000_000


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the recipe at `path` with `overrides` `key.path=value`.

    Imports nothing heavy. Raises ConfigError, one line."""
    tree = read_tree(Path(path), overrides)
    with errors_of(Path(path)):
        config = decode(tree, Config)
        _require_no_contradiction(config, overrides)
        config = apply_schedule(_with_roles(with_settings(with_spec(config))))
        if problem := check(config):
            raise ConfigError(problem)
    return config


def _require_no_contradiction(config: Config, overrides: Sequence[str]) -> None:
    """Refuse overrides that disagree with the schedule: it replaces keys of the recipe, not of the command line."""
    decided = SCHEDULES[config.schedule] if config.schedule else {}
    for key in (override.partition("=")[0].strip() for override in overrides):
        section, _, name = key.partition(".")
        if key in decided and (given := getattr(getattr(config, section), name)) != decided[key]:
            raise ConfigError(
                f"{key}: schedule {config.schedule!r} sets it to {shown(decided[key])}, got {shown(given)};"
                " leave one of them out"
            )


def with_spec(config: Config) -> Config:
    """Return the configuration with its model family's name, and that family's `SamplingSpec` for every sampling.

    A bucket's is merged over `rollout.sampling`. A family that is not found, or that an emulated job does not name,
    leaves the configuration as it is. Raises ConfigError with the key that the family refuses."""
    name = config.model.pipeline
    if name is None and config.emulation is not None:
        return config
    try:
        name = family_of(Path(config.model.path)) if name is None else name
        sampling = find_family(name).sampling
    except ValueError:
        return config
    rollout = config.rollout
    spec = decode(rollout.sampling, sampling, "rollout", "sampling")
    buckets = []
    for number, bucket in enumerate(rollout.buckets):
        key = "rollout", "buckets", str(number), "sampling"
        own = msgspec.to_builtins(bucket.sampling)
        if not isinstance(own, dict):
            raise ConfigError(f"{'.'.join(key)}: expected mapping, got {shown(own)}")
        buckets.append(replace(bucket, sampling=decode(msgspec.to_builtins(spec) | own, sampling, *key)))
    rollout = replace(rollout, sampling=spec, buckets=tuple(buckets))
    return replace(config, model=replace(config.model, pipeline=name), rollout=rollout)


def family_of(folder: Path) -> str:
    """Return the one installed family that takes the checkpoint in `folder`, by the class that its index names.

    ValueError, one line naming the key, if there is none, or several."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"model.path: {folder} is not a checkpoint folder in diffusers layout: it has no {index.name}")
    try:
        found = json.loads(read_file(index, _LARGEST_INDEX).decode("utf-8"))["_class_name"]
    except (TooLargeError, OSError) as error:
        raise ValueError(f"model.path: {index} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError(f"model.path: {index} names no pipeline class; copy it again") from None
    names = [name for name in family_names() if _takes(name, found)]
    if not names:
        raise ValueError(
            f"model.path: {folder} is a {found} checkpoint, and none of the installed families takes it, which are"
            f" {[*family_names()]}"
        )
    if len(names) > 1:
        raise ValueError(f"model.pipeline: {folder} is a {found} checkpoint, and {names} all take it: name one")
    return names[0]


def _takes(name: str, model_index_class: object) -> bool:
    try:
        return find_family(name).model_index_class == model_index_class
    except ValueError:  # a foreign package that is broken, which may have nothing to do with this checkpoint
        return False


def with_settings(config: Config) -> Config:
    """Return the configuration with `algorithm.settings` as the section of an objective of another package.

    `omni_async.algorithms.validation` refuses names of no objective, and settings that one does not have."""
    algorithm = config.algorithm
    if algorithm.name not in registered_names(OBJECTIVES):
        return config
    objective = _found(find_registered, algorithm.name, OBJECTIVES, object, "algorithm.name")
    section: type[Section] | None = getattr(objective, "settings", None)
    if section is None:
        return config
    settings = decode(algorithm.settings, section, "algorithm", "settings")
    return replace(config, algorithm=replace(algorithm, settings=settings))


def _with_roles(config: Config) -> Config:
    """Return the configuration with the `settings` of every role of another package as that package's section."""
    return replace(config, roles=tuple(_with_own_settings(number, role) for number, role in enumerate(config.roles)))


def _with_own_settings(number: int, role: Role) -> Role:
    section = _found(find_service, role.name).settings
    if section is not None:
        return replace(role, settings=decode(role.settings, section, "roles", str(number), "settings"))
    if role.settings:
        raise ConfigError(f"roles.{number}.settings: the role {role.name!r} has none; remove them")
    return role


def _found(find: Any, *arguments: Any) -> Any:
    """Call `find`, whose ValueError about another package says it all."""
    try:
        return find(*arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolved_yaml(config: Config) -> str:
    """Return the configuration with every default filled in and credentials masked, as YAML that `load` reads back."""
    return to_yaml(redact(msgspec.to_builtins(config)))
