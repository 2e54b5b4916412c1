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
    """Return the text of a recipe, with its keys in the schema's order.

    Args:
        head: the file's opening paragraphs.
        tree: its values.
        reasons: by key, the reason for its value; follows the description of a key that is no section.
        sampling: the type of `rollout.sampling`."""
    texts = {path: description(annotation) for path, annotation, _ in walk(Config)}
    texts |= {path: description(annotation) for path, annotation, _ in walk(sampling, "rollout.sampling.")}
    order = [*texts]

    def lines_of(section: Mapping[str, Any], parents: str, indent: str) -> Iterator[str]:
        paths = {f"{parents}{name}": name for name in section}
        for path in sorted(paths, key=lambda path: order.index(path) if path in texts else len(order)):
            name, value = paths[path], section[paths[path]]
            if not parents:
                yield ""
            yield from _comment(texts.get(path, ""), indent)
            if isinstance(value, dict) and any(key.startswith(f"{path}.") for key in texts):
                yield f"{indent}{name}:"
                yield from lines_of(value, f"{path}.", f"{indent}  ")
                continue
            if path in reasons:
                yield from _comment(f"Here: {reasons[path]}.", indent)
            yield from textwrap.indent(_value(name, value), indent).splitlines()

    opening = (line for paragraph in head.splitlines() for line in _comment(paragraph, "") or ["#"])
    return "\n".join([*opening, *lines_of(tree, "", "")]) + "\n"


def _value(name: str, value: Any) -> str:
    if isinstance(value, dict) and not any(isinstance(below, dict | list) for below in value.values()):
        return f"{name}: {to_yaml(value, compact=True)}"  # a single line
    return to_yaml({name: value}, compact=isinstance(value, dict | list))


def _comment(text: str, indent: str) -> list[str]:
    first = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=first, break_on_hyphens=False)
