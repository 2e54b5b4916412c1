"""Loads a recipe: read, decode, resolve, check.

Every mistake is one `ConfigError` with the key and its allowed values. A value passes four steps, once each:

    read     tree.py      the file, the files it extends, overrides, absolute paths      -> plain data
    decode   load.py      the schema: keys, types, bounds                                -> `Config`
    resolve  load.py      sections whose keys other packages define, and the schedule    -> `Config`
    check    checks.py    combinations                                                   -> the same `Config`

An objective's own combinations are checked when a command needs the objective (`roles.plan.require_trainable`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from omni_async.config.checks import check
from omni_async.config.decoding import decode_json
from omni_async.config.describe import annotation_at, describe, fields_of, names_in, reason, spelling, struct_of
from omni_async.config.hub import no_checkpoint
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.redact import redact, shown
from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.config.schema import Config
from omni_async.config.section import Section
from omni_async.config.tree import MAPPING, errors_of, files_of, named_paths, overridden, read_tree, tree_of
from omni_async.config.yaml_text import ConfigError, to_yaml
from omni_async.plugins.entry_points import OBJECTIVES, did_you_mean, find_registered, registered_names
from omni_async.plugins.families import SamplingSpec, family_names, find_family
from omni_async.plugins.programs import find_program
from omni_async.plugins.services import find_service

T = TypeVar("T", bound=msgspec.Struct)

_MOVED = {
    f"rollout.{key}": f"rollout.sampling.{key}" for key in ("height", "width", "true_cfg_scale", "negative_prompt")
}
INDEX = "model_index.json"
CONFIG = "config.json"
LARGEST_JSON = 10_000_000
LFS_POINTER = b"version https://git-lfs"


def load(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), within: Path | None = None) -> Config:
    """Load a recipe, the path of a file or a mapping of sections, with `overrides` `key.path=value`.

    Paths in a mapping are relative to the working directory. `within`: the run's folder, for a recipe of a run. Imports
    nothing heavy. Raises ConfigError, one line."""
    if isinstance(recipe, Mapping):
        return _checked(tree_of(recipe, overrides), Path(MAPPING), overrides)
    path = Path(recipe)
    tree = read_tree(path, overrides, within)
    if within is not None and not (tree.get("emulation") or _at(tree, "model", "pipeline")):
        with errors_of(path):
            decode(tree, Config)
            raise ConfigError("model.pipeline: missing, which every run writes; the model's folder is not read")
    return _checked(tree, path, overrides)


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def inputs_of(recipe: Path | None, config: Config) -> list[Path]:
    """Return the files and folders that a command reads for a recipe: its own files, and existing paths that it names.

    `recipe`: its file, if it has one."""
    named = named_paths(msgspec.to_builtins(config))
    there = [Path(path) for path in named if os.path.exists(path)]  # noqa: PTH110 (pathlib raises at long names)
    return [*(files_of(recipe) if recipe is not None else ()), *there]


def of_tree(tree: Mapping[str, Any], source: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a resolved recipe that is plain data.

    Args:
        tree: as `resolved_yaml` writes it; paths are absolute.
        source: the name of its source, for errors.
        overrides: as in `load`.

    Raises:
        ConfigError: one line that begins with `source`."""
    own = msgspec.json.decode(msgspec.json.encode(tree))  # overrides change it
    return _checked(overridden(own, overrides, source), source, overrides)


def _checked(tree: dict[str, Any], source: Path, overrides: Sequence[str]) -> Config:
    with errors_of(source):
        config = _resolved(tree, overrides)
        if problem := check(config):
            raise ConfigError(problem)
    return config


def of_model(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration for the checkpoint in `folder`, with defaults for every other key.

    It serves to generate samples: requirements of training are neither present nor checked.

    Args:
        folder: absolute.
        overrides: as in `load`.

    Raises:
        ConfigError: one line that begins with the folder."""
    tree = overridden({"model": {"path": str(folder)}, "data": {}}, overrides, folder)
    with errors_of(folder):
        return _resolved(tree, overrides)


def _resolved(tree: dict[str, Any], overrides: Sequence[str]) -> Config:
    config = decode(tree, Config)
    _require_no_contradiction(config, overrides)
    return apply_schedule(_with_program(_with_roles(with_settings(with_spec(config)))))


def _require_no_contradiction(config: Config, overrides: Sequence[str]) -> None:
    """Refuse overrides that disagree with the schedule, which replaces keys of the recipe, not of the command line."""
    decided = SCHEDULES[config.schedule] if config.schedule else {}
    for key in (override.partition("=")[0].strip() for override in overrides):
        section, _, name = key.partition(".")
        if key in decided and (given := getattr(getattr(config, section), name)) != decided[key]:
            raise ConfigError(
                f"{key}: schedule {config.schedule!r} sets it to {shown(decided[key])}, got {shown(given)};"
                " leave one of them out"
            )


def decode(tree: Any, section: type[T], *prefix: str) -> T:
    """Return `tree` as the section with the key `prefix`. Raises ConfigError with a wrong value's key and bounds."""
    try:
        return msgspec.convert(tree, section)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, tree, section, prefix)) from None


def _explain(error: msgspec.ValidationError, tree: Any, root: type[msgspec.Struct], prefix: Sequence[str]) -> str:
    """Turn msgspec's message into `path: expected ..., got ...`."""
    text, place, location = str(error).rpartition(" - at `$")  # the last: a key of the recipe may contain it
    if not place or text.endswith(" field `"):
        text, location = str(error), ""
    path = re.findall(r"[^.\[\]`]+", location)
    where = ".".join([*prefix, *path])
    if isinstance(error.__cause__, ValueError):  # from a section's own check
        return f"{where}: {error.__cause__}"
    if unknown := re.match(r"(?s)Object contains unknown field `(.*)`", text):
        key = ".".join([*prefix, *path, unknown[1]])
        if key in _MOVED:
            return f"{key}: is called {_MOVED[key]} now"
        section = struct_of(annotation_at(root, path)) if path else root
        allowed = sorted(fields_of(section)) if section else []
        return f"{key}: unknown key{did_you_mean(unknown[1], allowed) or ';'} allowed: {', '.join(allowed)}"
    if missing := re.match(r"Object missing required field `(.*)`", text):
        absent = [*path, missing[1]]
        return f"{'.'.join([*prefix, *absent])}: required, expected {describe(annotation_at(root, absent))}"
    annotation, found = annotation_at(root, path), tree
    for key in path:
        found = found[int(key)] if isinstance(found, list) else found[key]
    expected = describe(annotation, found) if annotation is not None else text.lower()
    why = reason(annotation, found)
    hint = did_you_mean(found, names_in(annotation)) if isinstance(found, str) else ""
    if not hint and shown(found) == repr(found):  # not a credential
        hint = spelling(where, annotation, found)
    return f"{where or 'the file'}: expected {expected}{f' ({why})' if why else ''}, got {shown(found)}{hint}"


def with_spec(config: Config) -> Config:
    """Return the configuration with its model family's name, and that family's `SamplingSpec` for every sampling.

    A bucket's sampling is merged over `rollout.sampling`. The configuration is unchanged if the family is not found, or
    if an emulated job names no family. Raises ConfigError with the key that the family refuses."""
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
    if config.algorithm.teacher is not None:
        own = config.algorithm.teacher.sampling
        for one in rollout.specs:
            taught = decode(msgspec.to_builtins(one) | own, sampling, "algorithm", "teacher", "sampling")
            _require_same_samples(one, taught)
    return replace(config, model=replace(config.model, pipeline=name), rollout=rollout)


def _require_same_samples(spec: SamplingSpec, taught: SamplingSpec) -> None:
    """Raise ConfigError if a teacher's spec is of other samples or other encoded prompts than the policy's."""
    if taught.media() != spec.media():
        raise ConfigError("algorithm.teacher.sampling: a teacher computes the policy's samples, so it has their size")
    for key in spec.encoding_keys:
        asked = getattr(taught, key, None)
        # Only prompts of a policy without guidance get the teacher's negative prompt (`Config.encoded_for`).
        teachers = key == "negative_prompt" and taught.guided and not spec.guided
        if asked != getattr(spec, key, None) and not teachers:
            raise ConfigError(
                f"algorithm.teacher.sampling.{key}: a teacher reads prompts as they are encoded for the policy; remove"
                f" it, or set rollout.sampling.{key}, got {shown(asked)}"
            )


def family_of(folder: Path) -> str:
    """Return the installed family for the checkpoint in `folder`, by the class that it names.

    Raises ValueError, one line naming the key, unless exactly one family takes it."""
    layout, found = checkpoint_class(folder)
    if found is None:
        raise ValueError(f"model.path: {folder / INDEX} names no pipeline class; copy it again")
    names = [name for name in family_names() if _takes(name, layout, found)]
    if not names:
        raise ValueError(
            f"model.path: {folder} is a {found} checkpoint, and none of the installed families takes it, which are"
            f" {[*family_names()]}"
        )
    if len(names) > 1:
        raise ValueError(f"model.pipeline: {folder} is a {found} checkpoint, and {names} all take it: name one")
    return names[0]


def checkpoint_class(folder: Path) -> tuple[Literal["diffusers", "transformers"], Any]:
    """Return a checkpoint's layout, and the class that its model_index.json or its config.json names, if any.

    Only a folder without model_index.json is in transformers layout. Raises ConfigError for a folder in neither."""
    if not (folder / INDEX).is_file() and (folder / CONFIG).is_file():
        names = read_model_json(folder / CONFIG).get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return "transformers", names[0]
    return "diffusers", read_model_index(folder).get("_class_name")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint in either layout."""
    if (folder / INDEX).is_file():
        return True
    try:
        return checkpoint_class(folder)[0] == "transformers"
    except ConfigError:
        return False


def read_model_index(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's model_index.json. Raises ConfigError if it is missing or invalid."""
    if not (folder / INDEX).is_file():
        raise ConfigError(no_checkpoint(folder))
    index = read_model_json(folder / INDEX)
    if wrong := next((name for name, part in index.items() if isinstance(part, list) and not _is_part(name)), None):
        raise ConfigError(f"model.path: {folder / INDEX}: expected names of folders next to it, got {wrong[:200]!r}")
    return index


def _is_part(name: str) -> bool:
    return name not in ("", "..") and "\0" not in name and Path(name).name == name


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a small JSON file of a checkpoint. Raises ConfigError if it is no mapping."""
    try:
        read = read_file(path, LARGEST_JSON)
    except TooLargeError as error:
        raise ConfigError(f"model.path: {path} is {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error.strerror or error}") from None
    if read.startswith(LFS_POINTER):
        raise ConfigError(f"model.path: {path} is a Git LFS pointer and not the file; fetch it with `git lfs pull`")
    try:
        content = decode_json(read)
    except msgspec.DecodeError as error:
        raise ConfigError(f"model.path: {path} is cut off or no JSON ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path}: expected a JSON object, got a {type(content).__name__}")
    return content


def _takes(name: str, layout: str, model_index_class: object) -> bool:
    try:
        family = find_family(name)
        return (family.layout, family.model_index_class) == (layout, model_index_class)
    except ValueError:  # a broken foreign package, which may be unrelated to this checkpoint
        return False


def with_settings(config: Config) -> Config:
    """Return the configuration with `algorithm.settings` as the section of an objective of another package.

    `omni_async.algorithms.checks` refuses unknown objectives, and settings that an objective does not have."""
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
    """Return the configuration with the `settings` of every foreign role as its package's section."""
    roles = []
    for number, role in enumerate(config.roles):
        section = _found(find_service, role.name).settings
        if section is not None:
            role = replace(role, settings=decode(role.settings, section, "roles", str(number), "settings"))
        elif role.settings:
            raise ConfigError(f"roles.{number}.settings: the role {role.name!r} has none; remove them")
        roles.append(role)
    return replace(config, roles=tuple(roles))


def _with_program(config: Config) -> Config:
    """Return the configuration with the `settings` of its rollout program as the program's section."""
    program = config.rollout.program
    if program is None:
        return config
    section = _found(find_program, program.name).settings
    if section is None:
        if program.settings:
            raise ConfigError(f"rollout.program.settings: {program.name!r} has none; remove them")
        return config
    settings = decode(program.settings, section, "rollout", "program", "settings")
    return replace(config, rollout=replace(config.rollout, program=replace(program, settings=settings)))


def _found(find: Any, *arguments: Any) -> Any:
    """Call `find`; raise its ValueError as a ConfigError with the same text."""
    try:
        return find(*arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolved_yaml(config: Config) -> str:
    """Return the configuration with every default filled in and credentials masked, as YAML that `load` reads back."""
    return to_yaml(redact(msgspec.to_builtins(config)))
