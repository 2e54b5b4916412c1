"""Writes the chosen keys as a recipe that extends the one they were chosen for, with the reasons as comments."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config import Config, ConfigError, load
from omni_async.config.redact import redact
from omni_async.config.yaml_text import to_yaml
from omni_async.tune.keys import with_keys
from omni_async.tune.report import number
from omni_async.tune.tuning import Tuned

_WIDTH = 140


def require_writable(out: Path, recipe: Path) -> None:
    """Check, before anything is searched, that the file can be written and would not replace the recipe.

    Raises ConfigError."""
    if out.exists() and out.samefile(recipe):
        raise ConfigError(f"--out: {out} is the recipe itself; the tuned one extends it, so give another name")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8"):
            pass
        if out.stat().st_size == 0:
            out.unlink()
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error.strerror or error}") from None


def write_tuned(out: Path, recipe: Path, config: Config, overrides: Sequence[str], tuned: Tuned) -> None:
    """Write the tuned recipe.

    `config` is the recipe with the command line's overrides, which go into the file too. Raises ConfigError if it
    cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            tuned_yaml(os.path.relpath(recipe.resolve(), out.parent.resolve()), config, overrides, tuned),
            encoding="utf-8",
        )
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error.strerror or error}") from None
    written = load(out)
    promised = with_keys(written, tuned.chosen.keys)
    if written != promised:
        raise AssertionError(f"{out} does not read back as what was simulated")


def tuned_yaml(base: str, config: Config, overrides: Sequence[str], tuned: Tuned) -> str:
    """Return the text of the recipe. `base`: the recipe's path relative to the file's folder."""
    simulated = tuned.chosen.simulated
    head = (
        f"{number(tuned.chosen.images_per_s)} images/s on {tuned.devices} {tuned.kind} ({number(simulated.step_s)} s"
        f" per update), staleness {simulated.staleness_mean:.2f} on average and {simulated.staleness_max} at most,"
        f" simulated with profile {tuned.profile}. The recipe as it is: {number(tuned.recipe.images_per_s)} images/s on"
        f" {tuned.recipe_devices:g}. Written by omni-async tune."
    )
    given = _given(config, overrides, tuned.keys)
    lines = [*_comment(head), *_yaml({"extends": base})]
    if "schedule" in tuned.keys:
        lines += [*_comment(f"schedule: {tuned.reasons['schedule']}"), *_yaml({"schedule": tuned.keys["schedule"]})]
    sections = [path.split(".")[0] for path in tuned.keys if "." in path]
    for section in dict.fromkeys([*sections, *given]):
        rest = given.get(section, {})
        if not isinstance(rest, dict):
            lines += _yaml({section: rest})
            continue
        lines.append(f"{section}:")
        for path, value in tuned.keys.items():
            if path.startswith(f"{section}."):
                lines += [f"  {line}" for line in [*_comment(tuned.reasons[path]), *_yaml({path.split(".")[1]: value})]]
        if rest:
            lines += [f"  {line}" for line in ["# given on the command line", *_yaml(rest)]]
    return "\n".join(lines) + "\n"


def _given(config: Config, overrides: Sequence[str], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command line changed, as a tree of final values, without what tuning chose.

    Of a section given as a whole, the rest of it."""
    resolved: Any = msgspec.to_builtins(config)
    tree: dict[str, Any] = {}
    for override in overrides:
        path = override.partition("=")[0].strip()
        if path in chosen:
            continue
        value, at, keys = resolved, tree, path.split(".")
        for depth, key in enumerate(keys):
            value = value[key]
            if depth == len(keys) - 1 or not isinstance(value, dict):  # lists are replaced as a whole
                at[key] = value
                break
            at = at.setdefault(key, {})
    for path in chosen:
        section, _, key = path.partition(".")
        if isinstance(tree.get(section), dict):
            tree[section].pop(key, None)
    return {section: redact(rest) for section, rest in tree.items() if rest != {}}


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml(tree: Mapping[str, Any]) -> list[str]:
    return to_yaml(dict(tree)).splitlines()
