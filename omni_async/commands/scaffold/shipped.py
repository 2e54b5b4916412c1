"""Finds the recipes and pinned versions that come with the package, and copies recipes for `omni-async init --from`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import omni_async
from omni_async.config import ConfigError
from omni_async.config.reading import read_file
from omni_async.plugins.entry_points import not_one_of

_RECIPES = Path("recipes")  # in the working directory, as in the repository
_EXTENDS = re.compile(r"^extends:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)
_LARGEST = 2**18  # bytes, the same limit as for a recipe that is trained


def shipped(name: str) -> Path:
    """Return a file or folder that a wheel has inside the package, and an editable install in its repository."""
    package = Path(omni_async.__file__).parent
    return package / name if (package / name).exists() else package.parent / name


def find_recipes() -> Path:
    """Return the folder `recipes` in the working directory, or the shipped folder if there is none."""
    return _RECIPES if _RECIPES.is_dir() else shipped("recipes")


def copy_recipes(name: str) -> str:
    """Copy a shipped folder of recipes, and the folders that it extends, to `recipes/`; return lines for the console.

    Keeps every file that exists. Raises ConfigError, one line, for an unknown name, a folder whose own recipes exist,
    or a folder that cannot be written."""
    source = shipped("recipes")
    folders = {path.parent.relative_to(source) for path in source.rglob("*.yaml")}
    known = {folder.name: folder for folder in sorted(folders, reverse=True)}
    found = known.get(name) or next((folder for folder in folders if str(folder) == name.rstrip("/")), None)
    if found is None:
        raise ConfigError(f"--from: {not_one_of(name, sorted(known))}")
    if any((_RECIPES / found / recipe.name).exists() for recipe in (source / found).glob("*.yaml")):
        raise ConfigError(f"--from: {_RECIPES / found}: is there already; work with it, or remove it")
    if found.parts[0] in _extended(source / found, source):
        found = Path(found.parts[0])
    target = _RECIPES / found
    wanted, copied, wrote = [str(found)], list[str](), list[str]()
    while wanted:
        folder = wanted.pop()
        if folder in copied:
            continue
        copied.append(folder)
        wanted += _extended(source / folder, source)
        if written := _copy_missing(source / folder, _RECIPES / folder):
            wrote.append(f"wrote {_RECIPES / folder}: {written} files")
    recipes = sorted(target.glob("*.yaml"))
    shown = [f"  omni-async {command} {recipes[0]}" for command in ("check", "train")]
    more = [] if len(recipes) == 1 else ["  omni-async list recipes"]
    return "\n".join([*wrote, "next:", *shown, *more])


def _copy_missing(source: Path, target: Path) -> int:
    """Copy the files of a folder that the target lacks; return their number. An existing file is the user's."""
    written = 0

    def copy(file: str, to: str) -> None:
        nonlocal written
        if not os.path.lexists(to):
            shutil.copy2(file, to)
            written += 1

    try:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, ignore=ignored, copy_function=copy, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"--from: {target}: cannot be written: {error}") from None
    return written


def _extended(folder: Path, recipes: Path) -> Iterator[str]:
    """Yield the names of the other folders whose recipes are extended by recipes of this one."""
    for path in folder.rglob("*.yaml"):
        for found in _EXTENDS.findall(read_file(path, _LARGEST).decode()):
            base = (path.parent / found).resolve()
            if base.is_relative_to(recipes.resolve()):
                yield base.relative_to(recipes.resolve()).parts[0]
