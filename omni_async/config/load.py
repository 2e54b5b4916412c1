"""Loads a YAML file and `key.path=value` overrides into a `Config`, or raises one `ConfigError` that names the key and
its allowed values."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.config.checkpoint_family import family_of
from omni_async.config.checks import check
from omni_async.config.describe import annotation_at, describe, fields_of, reason, struct_of
from omni_async.config.objective_section import objective_section
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.redact import is_secret_key, redact, redact_text
from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError, parse_yaml, to_yaml
from omni_async.families import PipelineFamily, SamplingSpec, find_family
from omni_async.services import find_service

# Paths in a recipe are relative to the recipe, so that it runs from anywhere; on the command line, to the working
# directory. run.dir is always relative to the working directory.
_PATHS = (
    "model.path",
    "data.prompts",
    "data.preferences",
    "validation.prompts",
    "checkpoint.resume",
    "emulation.profile",
    "run.dir",
)
_MOVED = {
    f"rollout.{key}": f"rollout.sampling.{key}" for key in ("height", "width", "true_cfg_scale", "negative_prompt")
}
_LONGEST_CHAIN = 8
_DEEPEST = 50  # levels of nesting; the schema has five
_LARGEST_FILE = 2**18  # bytes; PyYAML reads about 100 kB a second
_LONGEST_NAME = 255  # bytes of a file's name
_MOST_VALUES = 20_000  # aliases counted wherever they stand, or a few lines could stand for billions of values


def _at(tree: Any, path: list[str]) -> Any:
    for key in path:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


def _quoted(override: str) -> str:
    """Returns the override without its value if that may be or hold a credential."""
    path, separator, value = override.partition("=")
    plain = (
        redact_text(value) == value
        and not is_secret_key(path, 0 if value.isdecimal() else value)
        and not any(mark in value for mark in ":{[")
    )
    shown = override if plain or not separator else f"{path}=..."
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _index(items: list[Any], key: str, override: str) -> int:
    indices = [str(i) for i in range(len(items))]
    if key not in indices:
        raise ConfigError(f"override {_quoted(override)!r}: {key[:80]!r} is not an index of a list of {len(items)}")
    return indices.index(key)


def _set_override(tree: dict[str, Any], override: str) -> str:
    """Applies `a.b.c=value` (value in YAML) to the tree; returns the path."""
    path, separator, value = override.partition("=")
    path = path.strip()
    if not separator or not path:
        raise ConfigError(f"override {_quoted(override)!r}: expected key.path=value, e.g. trainer.updates=10")
    *parents, last = path.split(".")
    here: Any = tree
    for key in parents:
        if isinstance(here, list):
            here = here[_index(here, key, override)]
        else:
            if here.get(key) is None:
                here[key] = {}
            here = here[key]
        if not isinstance(here, (dict, list)):
            raise ConfigError(f"override {_quoted(override)!r}: {key!r} is a value, not a section")
    parsed = parse_yaml(value, f"override {path!r}")
    if isinstance(here, list):
        here[_index(here, last, override)] = parsed
    else:
        here[last] = parsed
    return path


def _anchor(tree: dict[str, Any], path: str, folder: Path) -> None:
    *parents, last = path.split(".")
    here: Any = tree
    for key in parents:
        here = here.get(key) if isinstance(here, dict) else None
    if isinstance(here, dict) and isinstance(here.get(last), str):
        if path == "emulation.profile" and not here[last].lower().endswith(".json"):
            return  # the name of a shipped profile
        if path == "checkpoint.resume" and here[last] == "auto":
            return
        if path == "run.dir":
            folder = Path()  # runs go where the command is started
            if not here[last].startswith("~"):
                return
        try:
            resolved = (folder / Path(here[last]).expanduser()).resolve()
            if long := [name for name in resolved.parts if len(os.fsencode(name)) > _LONGEST_NAME]:
                raise ValueError(
                    f"a name in it has {len(os.fsencode(long[0]))} bytes, file systems take {_LONGEST_NAME}"
                )
            here[last] = str(resolved)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{path}: expected a path, got {_shown(here[last])}: {error}") from None


def _require_plain(
    value: Any, path: tuple[str, ...] = (), above: tuple[Any, ...] = (), values: Iterator[int] | None = None
) -> None:
    """Refuses values that no field can mean, also inside a scorer's free-form options: nan, infinity, YAML's rarer
    types, endless structures."""
    key_path = ".".join(path)
    values = count() if values is None else values
    if next(values) > _MOST_VALUES:
        raise ConfigError(f"{'.'.join(path[:4])}: more than {_MOST_VALUES} values, aliases counted wherever they stand")
    if isinstance(value, (dict, list)):
        if len(above) > _DEEPEST or any(value is outer for outer in above):
            raise ConfigError(f"{'.'.join(path[:4])}: nested too deeply")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and not _is_encodable(key):
                raise ConfigError(
                    f"{key_path or 'the file'}: half a surrogate pair is no character, got the key {_shown(key)}"
                )
            _require_plain(item, (*path, str(key)), (*above, value), values)
    elif isinstance(value, str) and not _is_encodable(value):
        raise ConfigError(f"{key_path}: half a surrogate pair is no character, got {_shown(value)}")
    elif isinstance(value, float) and not math.isfinite(value):
        annotation = annotation_at(Config, [*path])
        raise ConfigError(
            f"{key_path}: expected a finite {describe(annotation) if annotation else 'number'}, got {value}"
        )
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{key_path}: expected a number below 2**63, got one of {value.bit_length()} bits")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"{key_path}: expected text, a number, true, false, null, a list or a mapping, got {type(value).__name__}"
        )


def _is_encodable(text: str) -> bool:
    """Tells whether a text can be written to a file: not with half a surrogate pair, as from "\\ud800" or a name on the
    command line that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_plain_at(file: Path, tree: dict[str, Any]) -> None:
    try:
        _require_plain(tree)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _shown(value: Any) -> str:
    text = repr(redact(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _explain(
    error: msgspec.ValidationError, tree: Any, root: type[msgspec.Struct] = Config, prefix: Sequence[str] = ()
) -> str:
    """Turns msgspec's message into `path: expected ..., got ...`. `root` is the section `prefix`, which `tree` is."""
    text, _, location = str(error).partition(" - at `$")
    path = re.findall(r"[^.\[\]`]+", location)
    if isinstance(error.__cause__, ValueError):  # of a section's own check
        return f"{'.'.join([*prefix, *path])}: {error.__cause__}"
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    missing = re.match(r"Object missing required field `(.*)`", text)
    if unknown:
        key = ".".join([*prefix, *path, unknown[1]])
        if key in _MOVED:
            return f"{key}: is called {_MOVED[key]} now"
        section = struct_of(annotation_at(root, path)) if path else root
        allowed = sorted(fields_of(section)) if section else []
        close = difflib.get_close_matches(unknown[1], allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    if missing:
        absent = [*path, missing[1]]
        return f"{'.'.join([*prefix, *absent])}: required, expected {describe(annotation_at(root, absent))}"
    annotation = annotation_at(root, path)
    found = _at(tree, path)
    expected = describe(annotation, found) if annotation is not None else text.lower()
    why = reason(annotation, found)
    where = ".".join([*prefix, *path]) or "the file"
    return f"{where}: expected {expected}{f' ({why})' if why else ''}, got {_shown(found)}"


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merges `own` over `base`: sections key by key, everything else as a whole."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads the file's tree, merged over that of the recipe it `extends`, with paths resolved."""
    asked = f" ({above[-1]} extends it)" if above else ""
    try:
        text = read_file(path, _LARGEST_FILE).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{asked}") from None
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error.strerror}, so no recipe{asked}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file can have
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{asked}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    _require_plain_at(path, tree)
    for key in _PATHS:
        _anchor(tree, key, path.parent)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: expected the path of a recipe, got {_shown(base)}")
    if len(above) >= _LONGEST_CHAIN or path.resolve() in above:
        raise ConfigError(f"{path}: extends: recipes extend each other in a circle, or more than {_LONGEST_CHAIN} deep")
    return _merge(_read(path.parent / base, (*above, path.resolve())), tree)


def _require_no_contradiction(path: Path, config: Config, overrides: Sequence[str]) -> None:
    """Refuses overrides that disagree with the schedule: it replaces keys of the recipe, not of the command line."""
    decided = SCHEDULES[config.schedule] if config.schedule else {}
    for key in (override.partition("=")[0].strip() for override in overrides):
        section, _, name = key.partition(".")
        if key in decided and (given := getattr(getattr(config, section), name)) != decided[key]:
            raise ConfigError(
                f"{path}: {key}: schedule {config.schedule!r} sets it to {_shown(decided[key])}, got {_shown(given)};"
                " leave one of them out"
            )


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a recipe, applies overrides and the schedule, and validates. Raises ConfigError with a one-line message;
    nothing heavy is imported."""
    path = Path(path)
    tree = _read(path)
    for override in overrides:
        key = _set_override(tree, override)
        for below in _PATHS:
            if below == key or below.startswith(f"{key}."):
                _anchor(tree, below, Path.cwd())
    _require_plain_at(path, tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error, tree)}") from None
    _require_no_contradiction(path, config, overrides)
    try:
        config = apply_schedule(with_roles(with_settings(with_spec(config))))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    problem = check(config)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return config


def with_spec(config: Config) -> Config:
    """Returns the configuration with the name of its model family, and with `rollout.sampling`, and each bucket's
    merged over it, as the family's `SamplingSpec`; as it is for a family that is not found, or where an emulated job
    names none. ConfigError names the key that the family refuses."""
    name = config.model.pipeline
    if name is None and config.emulation is not None:
        return config
    try:
        name = family_of(Path(config.model.path)) if name is None else name
        family = find_family(name)
    except ValueError:
        return config
    config = replace(config, model=replace(config.model, pipeline=name))
    rollout = config.rollout
    spec = _spec(rollout.sampling, family, "rollout", "sampling")
    buckets = []
    for number, bucket in enumerate(rollout.buckets):
        key = "rollout", "buckets", str(number), "sampling"
        own = msgspec.to_builtins(bucket.sampling)
        if not isinstance(own, dict):
            raise ConfigError(f"{'.'.join(key)}: expected mapping, got {_shown(own)}")
        buckets.append(replace(bucket, sampling=_spec(msgspec.to_builtins(spec) | own, family, *key)))
    return replace(config, rollout=replace(rollout, sampling=spec, buckets=tuple(buckets)))


def _spec(settings: Any, family: PipelineFamily, *prefix: str) -> SamplingSpec:
    try:
        return msgspec.convert(settings, family.sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, settings, family.sampling, prefix)) from None


def with_settings(config: Config) -> Config:
    """Returns the configuration with `algorithm.settings` as the section of an objective of another package.
    ConfigError names the key that the section refuses, and settings that no objective reads."""
    name, settings, prefix = config.algorithm.name, config.algorithm.settings, ("algorithm", "settings")
    try:
        section = objective_section(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if section is None:
        if settings:
            raise ConfigError(
                f"algorithm.settings: these are settings of an objective of another package, and {name!r} has none;"
                " remove them, or set algorithm.name"
            )
        return config
    try:
        found = msgspec.convert(settings, section)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, settings, section, prefix)) from None
    return replace(config, algorithm=replace(config.algorithm, settings=found))


def with_roles(config: Config) -> Config:
    """Returns the configuration with the `settings` of every role of another package as that package's section.
    ConfigError names a role that none brings, and the key that its section refuses."""
    roles = []
    for number, role in enumerate(config.roles):
        try:
            section = find_service(role.name).settings
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if section is None:
            if role.settings:
                raise ConfigError(f"roles.{number}.settings: the role {role.name!r} has none; remove them")
            roles.append(role)
            continue
        try:
            settings = msgspec.convert(role.settings, section)
        except msgspec.ValidationError as error:
            prefix = "roles", str(number), "settings"
            raise ConfigError(_explain(error, role.settings, section, prefix)) from None
        roles.append(replace(role, settings=settings))
    return replace(config, roles=tuple(roles))


def resolved_yaml(config: Config) -> str:
    """Returns the configuration with every default filled in and credentials masked, as YAML that `load` reads back."""
    return to_yaml(redact(msgspec.to_builtins(config)))
