"""Reads and writes the YAML of recipes: plain data, with errors of one line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from omni_async.config.redact import one_line

_LONGEST_MESSAGE = 2000
_LONGEST_NUMBER = 1000  # characters
_LONGEST_TEXT = 2**18  # characters of a file
_MOST_VALUES = 40_000  # with keys; each use of an alias counts in full, since a few lines could expand to billions


class ConfigError(ValueError):
    """A configuration that cannot run. Its text, always one line, is the whole message to the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST_MESSAGE))


class _Loader(yaml.SafeLoader):
    """Plain YAML, except that a duplicate key is an error, and some texts have their meaning of YAML 1.2.

    `1e-4` is a number (YAML 1.1 wants `1.0e-4`), and `on`, `off`, `yes`, `no` and dates are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's way)
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._left = _MOST_VALUES

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Stop at the first node beyond the bound, before the text behind it is read."""
        self._left -= 1
        if self._left < 0:
            raise _too_many()
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"keys are names, got {key!r}", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Refuse long numbers: YAML's base 60 (`1:1:1...`) takes time quadratic in the number's length."""
        if len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"a number of {len(node.value)} characters")
        integer = node.tag == "tag:yaml.org,2002:int"
        number: int | float = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        return number


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every text that `_Loader` would read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Every style except double-quoted, which escapes them, folds YAML's rarer line breaks away.
    style = '"' if set(text) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _Loader.construct_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def parse_yaml(text: str, where: str) -> Any:
    """Return plain data. Raises ConfigError, which begins with `where`, if the text is invalid or too large."""
    if len(text) > _LONGEST_TEXT:
        raise ConfigError(f"{where}: longer than {_LONGEST_TEXT} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > _MOST_VALUES:
            raise _too_many()
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{location}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        TypeError,
    ) as error:  # PyYAML's constructors raise these for `!!int ''` or `!!bool x`
        raise ConfigError(f"{where}: not valid YAML: a value does not fit its type: {error!r}") from None


def _num_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Count `node` and the nodes below it; an alias counts as its whole target.

    `known`: the counts by the identity of nodes; None for nodes that are still being counted."""
    if id(node) in known:
        counted = known[id(node)]
        if counted is None:
            raise yaml.YAMLError("a value holds itself")
        return counted
    known[id(node)] = None
    parts: Any = node.value if not isinstance(node, yaml.ScalarNode) else ()
    below = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
    counted = known[id(node)] = 1 + sum(_num_values(part, known) for part in below)
    return counted


def _too_many() -> yaml.YAMLError:
    return yaml.YAMLError(f"more than {_MOST_VALUES} values, aliases counted wherever they stand")


def to_yaml(tree: Any, compact: bool = False) -> str:
    """Dump plain data as YAML that `parse_yaml` reads back as the same data.

    `compact`: write each list and mapping of plain values on one line."""
    style = None if compact else False
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=style, sort_keys=False, allow_unicode=True)
