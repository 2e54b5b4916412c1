"""Generates docs/configuration.md from the schema, so that the page cannot disagree with the code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import yaml

from omni_async.config.describe import describe, description, fields_of, struct_of, walk
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError
from omni_async.plugins.families import family_names, find_family

_HEAD = (
    "# Configuration reference\n"
    "\n"
    "<!-- Generated from the schema in omni_async/config by `omni-async docs`; edit the schema, not this page. -->\n"
    "\n"
    "A recipe is one YAML file with the sections below. Unknown keys, wrong types, values out of range "
    "and impossible combinations are refused\n"
    "before anything starts, with the key and what it allows. Any value can be overridden on the command "
    "line as `key.path=value`. Relative paths\n"
    "in a recipe start at the recipe's folder. `extends: other.yaml` starts from another recipe: "
    "sections are merged key by key, and every other value\n"
    "replaces the one it finds.\n"
)


def reference() -> str:
    """Return the whole page, in Markdown. Raises ConfigError with the name of a family whose package is broken."""
    rows = list(walk(Config))
    sections = {name: struct_of(annotation) for name, annotation in fields_of(Config).items()}
    top = [row for row in rows if row[0] in sections and sections[row[0]] is None]
    parts = [_HEAD, _table("Top level", top)]
    for name, struct in sections.items():
        if struct is not None:
            parts += [_table(name, (row for row in rows if row[0].startswith((f"{name}.", f"{name}[]."))))]
    for name in family_names():
        try:
            sampling = find_family(name).sampling
        except ValueError as error:
            raise ConfigError(str(error)) from None
        parts.append(_table(f"rollout.sampling of {name}", walk(sampling, "rollout.sampling.")))
    return "\n".join(parts)


def _table(title: str, rows: Iterable[tuple[str, Any, Any]]) -> str:
    head = f"## {title}\n\n| key | allowed | default | meaning |\n|---|---|---|---|\n"
    return head + "".join(f"{_row(*row)}\n" for row in rows)


def _row(path: str, annotation: Any, default: Any) -> str:
    if default is msgspec.NODEFAULT:
        shown = "**required**"
    elif isinstance(default, msgspec.Struct):
        shown = "see below"
    else:
        value = list(default) if isinstance(default, tuple) else default
        shown = f"`{yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"
    allowed = describe(annotation, math.inf).replace("|", "\\|")
    return f"| `{path}` | {allowed} | {shown} | {description(annotation)} |"
