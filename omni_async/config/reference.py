"""Generates docs/configuration.md from the schema: the page cannot disagree with the code."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import yaml

from omni_async.config.describe import describe, description, fields_of, struct_of, walk
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError
from omni_async.families import family_names, find_family

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
    """Returns the whole page, in Markdown. ConfigError names a family whose package is broken."""
    parts = [_HEAD]
    sections = {name: struct_of(annotation) for name, annotation in fields_of(Config).items()}
    parts.append("## Top level\n\n| key | allowed | default | meaning |\n|---|---|---|---|")
    parts.extend(
        _row(path, field, default)
        for path, field, default in walk(Config, "")
        if path in sections and sections[path] is None
    )
    parts.append("")
    for section, struct in sections.items():
        if struct is None:
            continue
        parts.append(f"## {section}\n\n| key | allowed | default | meaning |\n|---|---|---|---|")
        own = (f"{section}.", f"{section}[].")
        parts.extend(_row(path, field, default) for path, field, default in walk(Config) if path.startswith(own))
        parts.append("")
    for name in family_names():
        parts.append(f"## rollout.sampling of {name}\n\n| key | allowed | default | meaning |\n|---|---|---|---|")
        try:
            sampling = find_family(name).sampling
        except ValueError as error:
            raise ConfigError(str(error)) from None
        parts.extend(_row(path, field, default) for path, field, default in walk(sampling, "rollout.sampling."))
        parts.append("")
    return "\n".join(parts)


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
