"""Writes a recipe as YAML with a comment for every key, from the schema's own documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from omni_async.config.describe import description, walk
from omni_async.config.schema import Config
from omni_async.config.yaml_text import to_yaml
from omni_async.plugins.families import SamplingSpec

_WIDTH = 116


def commented_yaml(head: str, tree: Mapping[str, Any], reasons: Mapping[str, str], sampling: type[SamplingSpec]) -> str:
    """Return the text of a recipe.

    Args:
        head: the file's opening paragraphs.
        tree: its values.
        reasons: by key, the reason for its value; follows the key's description.
        sampling: the type of `rollout.sampling`."""
    texts = {path: description(annotation) for path, annotation, _ in walk(Config)}
    texts |= {path: description(annotation) for path, annotation, _ in walk(sampling, "rollout.sampling.")}
    lines = [line for paragraph in head.splitlines() for line in _comment(paragraph, "") or ["#"]]
    for name, section in tree.items():
        lines += ["", *_entry(name, section, name, "", texts, reasons)]
    return "\n".join(lines) + "\n"


def _entry(
    name: str, value: Any, path: str, indent: str, texts: Mapping[str, str], reasons: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of a key: its comment, and its value or, for a section, the lines of its keys."""
    yield from _comment(texts.get(path, ""), indent)
    if path in reasons:
        yield from _comment(f"Here: {reasons[path]}.", indent)
    if isinstance(value, dict) and any(key.startswith(f"{path}.") for key in texts):
        yield f"{indent}{name}:"
        for key, below in value.items():
            yield from _entry(key, below, f"{path}.{key}", indent + "  ", texts, reasons)
    else:
        yield from textwrap.indent(_value(name, value), indent).splitlines()


def _value(name: str, value: Any) -> str:
    if isinstance(value, dict) and not any(isinstance(below, dict | list) for below in value.values()):
        return f"{name}: {to_yaml(value, compact=True)}"  # a single line
    return to_yaml({name: value}, compact=isinstance(value, dict | list))


def _comment(text: str, indent: str) -> list[str]:
    first = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=first, break_on_hyphens=False)
