"""Reads a recipe's tree: plain data from its file, the files it extends and the overrides, without the schema.

Paths in a recipe are relative to the recipe, so that it runs from anywhere. Paths on the command line, and `run.dir`
always, are relative to the working directory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_async.config.describe import annotation_at, describe
from omni_async.config.hub import downloaded
from omni_async.config.reading import TooLargeError, read_file, real_path
from omni_async.config.redact import REFERENCE, is_secret_key, redact_text, shown
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError, parse_yaml

PATHS = (
    "model.path",
    "algorithm.teacher.path",
    "data.prompts",
    "data.preferences",
    "validation.prompts",
    "checkpoint.resume",
    "emulation.profile",
    "reward.cache.path",
    "run.dir",
)
# The kind of repository whose name in the hub's cache may be given as a path.
HUB = dict.fromkeys(("model.path", "algorithm.teacher.path"), "model") | dict.fromkeys(
    ("data.prompts", "data.preferences", "validation.prompts"), "dataset"
)
# Parameters that are paths, for scorers with a registered short name. A `module:Class` interprets its own parameters.
_SCORER_PATHS = ("path", "processor", "head")
_OWN_PATHS = {
    "object_checks": ("path", "clip"),
    "image_reward": ("path", "weights"),
    "hps_v3": ("path", "weights", "question"),
}
MAPPING = "the recipe"  # names a recipe that is no file in errors
_FILE = re.compile(r"(.+\.py):[^:]+")
_INTERPOLATION = re.compile(r"\$\{(?:oc\.)?env[:.](?P<name>\w{1,100})[^{}]{0,100}\}")  # of other programs' recipes
_LONGEST_CHAIN = 8
_DEEPEST = 50  # levels of nesting; the schema has five
_LARGEST_FILE = 2**18  # bytes; PyYAML reads about 100 kB a second
_LONGEST_NAME = 255  # bytes of a file's name


def read_tree(path: Path, overrides: Sequence[str], within: Path | None = None) -> dict[str, Any]:
    """Read the recipe at `path` and apply the overrides `a.b.c=value`. Raises ConfigError.

    `within`: a folder that must contain the recipe and the recipes it extends."""
    return overridden(_read(path, within), overrides, path)


def tree_of(recipe: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree of a recipe that is a mapping; paths are relative to the working directory. Raises ConfigError.

    It may hold tuples and `Path`s, and extend a file."""
    tree = json.loads(json_of(recipe, MAPPING))
    return overridden(_based(tree, Path(MAPPING), None), overrides, Path(MAPPING))


def json_of(value: Any, where: str) -> str:
    """Return a value of a recipe as JSON; it may hold tuples and `Path`s.

    Raises ConfigError, one line that begins with `where`, for any other type."""

    def plain(other: Any) -> Any:
        if isinstance(other, Path | Mapping):
            return dict(other) if isinstance(other, Mapping) else str(other)
        raise TypeError(f"a value is of type {type(other).__name__}")

    try:
        return json.dumps(value, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        expected = "expected texts, numbers, true, false, None, lists and mappings"
        raise ConfigError(f"{where}: {error}; {expected}") from None


def overridden(tree: dict[str, Any], overrides: Sequence[str], path: Path) -> dict[str, Any]:
    """Apply the overrides to `tree`, which errors name `path`, and return it. Raises ConfigError."""
    for override in overrides:
        key = set_override(tree, override)
        for below in PATHS:
            if below == key or below.startswith(f"{key}."):
                _anchor(tree, below, Path.cwd())
        if f"{key}.".startswith(("reward.scorers.", "reward.servers.")) or key == "reward":
            _anchor_scorers(tree, Path.cwd())
    with errors_of(path):
        require_plain_tree(tree)
    return tree


def files_of(path: Path) -> list[Path]:
    """Return the file of a readable recipe and of the recipes it extends."""
    found: list[Path] = []
    _read(path, None, files=found)
    return found


def named_paths(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the absolute paths of files and folders that a resolved recipe, or a program that it starts, reads."""
    for key in set(PATHS) - {"run.dir", "checkpoint.resume"}:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        yield from _absolute(value)
    for server in tree["reward"]["servers"]:
        yield from _absolute(server["model"])
    for scorer in tree["reward"]["scorers"]:
        yield from _absolute(file_of(scorer["name"]))
        texts = [text for value in scorer["params"].values() for text in _absolute(value)]
        known = [text for key in path_params(scorer["name"]) for text in _absolute(scorer["params"].get(key))]
        # pathlib raises for a long text, or a folder without permission.
        yield from (text for text in texts if text in known or os.path.isfile(text))  # noqa: PTH113


def _absolute(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        yield value


@contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Name the file in every ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _read(
    path: Path, within: Path | None, above: tuple[Path, ...] = (), files: list[Path] | None = None
) -> dict[str, Any]:
    """Read the file's tree, with paths resolved and merged over its base (`extends`). Append to `files`."""
    if files is not None:
        files.append(path)
    asked = f" ({above[-1]} extends it)" if above else ""
    try:
        text = read_file(path, _LARGEST_FILE, within).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{asked}") from None
    except TooLargeError as error:
        raise ConfigError(f"{path}: {error.strerror}, so no recipe{asked}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file can have
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{asked}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    return _based(tree, path, within, above, files)


def _based(
    tree: dict[str, Any],
    path: Path,
    within: Path | None,
    above: tuple[Path, ...] = (),
    files: list[Path] | None = None,
) -> dict[str, Any]:
    """Resolve the paths of the tree at `path`, and merge it over its base (`extends`)."""
    with errors_of(path):
        require_plain_tree(tree)
    for key in PATHS:
        _anchor(tree, key, path.parent)
    _anchor_scorers(tree, path.parent)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: expected the path of a recipe, got {shown(base)}")
    if len(above) >= _LONGEST_CHAIN or real_path(path) in above:
        raise ConfigError(f"{path}: extends: recipes extend each other in a circle, or more than {_LONGEST_CHAIN} deep")
    return _merge(_read(path.parent / base, within, (*above, real_path(path)), files), tree)


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge `own` over `base`: sections key by key, other values as a whole."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def set_override(tree: dict[str, Any], override: str) -> str:
    """Apply `a.b.c=value` (value in YAML) to the tree; return the path."""
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
    here[_index(here, last, override) if isinstance(here, list) else last] = parsed
    return path


def _index(items: list[Any], key: str, override: str) -> int:
    indices = [str(i) for i in range(len(items))]
    if key not in indices:
        raise ConfigError(f"override {_quoted(override)!r}: {key[:80]!r} is not an index of a list of {len(items)}")
    return indices.index(key)


def _quoted(override: str) -> str:
    """Return the override, without its value if that may be or contain a credential."""
    path, separator, value = override.partition("=")
    plain = (
        redact_text(value) == value
        and not is_secret_key(path, 0 if value.isdecimal() else value)
        and not any(mark in value for mark in ":{[")
    )
    text = override if plain or not separator else f"{path}=..."
    return text if len(text) <= 200 else f"{text[:200]}..."


def _anchor(tree: dict[str, Any], path: str, folder: Path) -> None:
    """Make the path at the key `path` absolute, if there is a path; a relative path starts at `folder`."""
    *names, key = path.split(".")
    section: Any = tree
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    given = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(given, str):
        return
    if path == "emulation.profile" and not given.lower().endswith(".json"):
        return  # the name of a shipped profile
    if path == "checkpoint.resume" and given == "auto":
        return
    if path == "run.dir":
        folder = Path()  # runs are relative to the working directory
        if not given.startswith("~"):
            return
    section[key] = _resolved(path, given, folder, HUB.get(path))


def file_of(scorer: str) -> str | None:
    """Return the file of a scorer `path/file.py:name`, None for any other name."""
    return None if (found := _FILE.fullmatch(scorer)) is None else found[1]


def path_params(scorer: str) -> tuple[str, ...]:
    """Return the names of a scorer's parameters that are paths; none for a `module:Class`, which interprets its own."""
    return () if ":" in scorer else _OWN_PATHS.get(scorer, _SCORER_PATHS)


def _anchor_scorers(tree: dict[str, Any], folder: Path) -> None:
    """Make the paths of servers' models, and of scorers' files and parameters, absolute."""
    section = tree.get("reward")
    servers = section.get("servers") if isinstance(section, dict) else None
    for number, server in enumerate(servers if isinstance(servers, list) else []):
        if isinstance(server, dict) and isinstance(server.get("model"), str):
            server["model"] = _resolved(f"reward.servers.{number}.model", server["model"], folder, "model")
    scorers = section.get("scorers") if isinstance(section, dict) else None
    for number, scorer in enumerate(scorers if isinstance(scorers, list) else []):
        if not isinstance(scorer, dict):
            continue
        name, params = str(scorer.get("name", "")), scorer.get("params")
        if (file := file_of(name)) is not None:
            path = _resolved(f"reward.scorers.{number}.name", file, folder, None)
            scorer["name"] = path + name[len(file) :]
        if not isinstance(params, dict):
            continue
        for key in path_params(name):
            given = params.get(key)
            if isinstance(given, str) and not given.startswith(REFERENCE):
                params[key] = _resolved(f"reward.scorers.{number}.params.{key}", given, folder, "model")


def _resolved(path: str, given: str, folder: Path, hub: str | None) -> str:
    """Return the absolute path of `given`, the value of the key `path`; a relative path starts at `folder`.

    `hub`: model or dataset, if a missing path may be the name of one in the hub's cache."""
    try:
        resolved = (folder / Path(given).expanduser()).resolve()
        if long := [size for name in resolved.parts if (size := len(os.fsencode(name))) > _LONGEST_NAME]:
            raise ValueError(f"a name in it has {long[0]} bytes, file systems take {_LONGEST_NAME}")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path}: expected a path, got {shown(given)}: {error}") from None
    if hub and not resolved.exists() and (found := downloaded(given, hub)) is not None:
        resolved = found
    return str(resolved)


def require_plain_tree(value: Any, path: tuple[str, ...] = ()) -> None:
    """Refuse values that no field accepts, also inside a scorer's free-form options.

    These are nan, infinity, huge integers, texts that cannot be encoded or that other programs would replace
    (`${env:X}`), YAML's rarer types, and deep structures."""
    key_path = ".".join(path)
    if isinstance(value, (dict, list)):
        if len(path) > _DEEPEST:
            raise ConfigError(f"{'.'.join(path[:4])}: nested too deeply")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and not _is_encodable(key):
                raise ConfigError(
                    f"{key_path or 'the file'}: half a surrogate pair is no character, got the key {shown(key)}"
                )
            require_plain_tree(item, (*path, str(key)))
    elif isinstance(value, str) and not _is_encodable(value):
        raise ConfigError(f"{key_path}: half a surrogate pair is no character, got {shown(value)}")
    elif isinstance(value, str) and (found := _INTERPOLATION.search(value)) is not None:
        name = found["name"]
        raise ConfigError(
            f"{key_path}: {found[0]} is not replaced here; for a credential write {REFERENCE}{name}, for any other"
            f' value {key_path}="${name}" on the command line'
        )
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
    """Return whether a text can be encoded in UTF-8.

    It cannot with half a surrogate pair, as from "\\ud800" or a name on the command line that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
