"""Describes in words the values that a field allows, for error messages and the generated reference."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_BOUNDS = {
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "multiple_of": "multiple of",
    "min_length": "length >=",
    "pattern": "matching",
}
_PLAIN = re.compile(r"[A-Za-z_][\w./]{0,60}")  # YAML needs no quotation marks for it


def _strip(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    if get_origin(annotation) is not Annotated:
        return annotation, []
    base, *metas = get_args(annotation)
    return base, [meta for meta in metas if isinstance(meta, msgspec.Meta)]


def _extra(meta: msgspec.Meta, key: str) -> Any:
    return (meta.extra or {}).get(key)


def describe(annotation: Any, value: Any = None) -> str:
    """Describe the allowed values of an annotation: `float > 0 or null`, `one of 'ray', 'inprocess'`, `list of 2 int`.

    Bounds that only exclude absurd values are named only if `value` may violate them."""
    base, metas = _strip(annotation)
    origin, args = get_origin(base), get_args(base)
    length = next((meta.min_length for meta in metas if meta.min_length and meta.min_length == meta.max_length), None)
    bounds = [
        _bound(meta, key)
        for meta in metas
        for key in _BOUNDS
        if _matters(meta, key, value) and (key != "min_length" or length is None)
    ]
    if origin is Literal:
        text = "one of " + ", ".join(map(repr, args))
    elif origin in (Union, types.UnionType):
        text = " or ".join(describe(arg, value) for arg in args)
    elif origin is tuple:
        number = length if args[-1] is Ellipsis else len(args)
        text = f"list of {'' if number is None else f'{number} '}{describe(args[0], value)}"
    elif base is type(None):
        text = "null"
    elif base is Any or origin is dict or (isinstance(base, type) and issubclass(base, msgspec.Struct)):
        text = "mapping"
    else:
        text = getattr(base, "__name__", str(base))
    return f"{text} {', '.join(bounds)}" if bounds else text


def _bound(meta: msgspec.Meta, key: str) -> str:
    bound, why = getattr(meta, key), _extra(meta, "why")
    if key == "pattern" and why:
        return f"of {why}"
    # 1000000.0 as 1000000, and 1e+12 as 1e12
    return f"{_BOUNDS[key]} {f'{bound:.12g}'.replace('e+', 'e') if isinstance(bound, float) else bound}"


def _matters(meta: msgspec.Meta, key: str, value: Any) -> bool:
    if getattr(meta, key) is None:
        return False
    if not _extra(meta, "generous"):
        return True
    return _is_above(meta, value) if key == "le" else key != "pattern" or isinstance(value, str)


def _is_above(meta: msgspec.Meta, value: Any) -> bool:
    return isinstance(value, int | float) and meta.le is not None and value > meta.le


def reason(annotation: Any, value: Any) -> str:
    """Return the reason why `value` is too large; empty if the bound has no reason."""
    return next((why for m in _strip(annotation)[1] if (why := _extra(m, "why")) and _is_above(m, value)), "")


def description(annotation: Any) -> str:
    """Return the documentation attached to a field, or to its non-null type; or an empty string."""
    base, metas = _strip(annotation)
    inner = (description(a) for a in get_args(base) if type(None) in get_args(base))
    return next(filter(None, (*(m.description for m in reversed(metas)), *inner)), "")


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the section that a field contains (through Annotated, Optional and tuple); None if there is no section."""
    base, _ = _strip(annotation)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        return base
    return next((found for a in get_args(base) if (found := struct_of(a)) is not None), None)


def spelling(key: str, annotation: Any, value: Any) -> str:
    """Return the end of a message about a plain value where a list or a mapping belongs: how to write that value.

    Empty for any other wrong value."""
    if value is None or isinstance(value, list):
        return ""
    base, metas = _strip(annotation)
    members = [_strip(one)[0] for one in get_args(base)] if get_origin(base) in (Union, types.UnionType) else [base]
    members = [one for one in members if one is not type(None)]
    if len(members) != 1 or any(meta.max_length for meta in metas):
        return ""
    items = _items_of(members[0])
    if items and items[-1] is not Ellipsis:
        return ""
    section = struct_of(members[0])
    if isinstance(value, dict):
        return f"; write {key}=[{{...}}]" if items and section else ""
    setting = "" if key.rpartition(".")[2].isdecimal() else f"{key}="
    plain = isinstance(value, int | float) or _PLAIN.fullmatch(value) is not None
    text = str(value) if plain and not isinstance(value, bool) else "VALUE"
    if section is not None:
        names = [*fields_of(section)]
        if "name" not in names or not isinstance(value, str):
            return f"; set its keys, such as {names[0]}"
        text = f"{{name: {text}}}"
    elif not items:
        text = "{KEY: VALUE}" if members[0] is Any or get_origin(members[0]) is dict else ""
    return f"; write {setting}{f'[{text}]' if items else text}" if text else ""


def _items_of(annotation: Any) -> tuple[Any, ...]:
    """Return the arguments of a list-like field's tuple (through Annotated and Optional); empty for any other field."""
    base, _ = _strip(annotation)
    if get_origin(base) in (Union, types.UnionType):
        return next((items for member in get_args(base) if (items := _items_of(member))), ())
    return get_args(base) if get_origin(base) is tuple else ()


def names_in(annotation: Any) -> list[str]:
    """Return the names that a field accepts, through Annotated and Optional."""
    base, _ = _strip(annotation)
    if get_origin(base) is Literal:
        return [name for name in get_args(base) if isinstance(name, str)]
    return [name for arg in get_args(base) for name in names_in(arg)]


@cache
def fields_of(section: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the annotation of each field; callers must not change it."""
    return get_type_hints(section, include_extras=True)


def annotation_at(root: type[msgspec.Struct], path: list[str]) -> Any:
    """Return the annotation of `rollout.sde.kind`-like paths (`reward.scorers.0.name` in a list).

    None if the path leaves the schema."""
    annotation: Any = root
    for key in path:
        items = _items_of(annotation)
        if items and key.isdecimal():
            annotation = items[0] if items[-1] is Ellipsis else items[min(int(key), len(items) - 1)]
            continue
        section = struct_of(annotation)
        if section is None or key not in (fields := fields_of(section)):
            return None
        annotation = fields[key]
    return annotation


def walk(section: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, annotation, default) of every field, depth first; `msgspec.NODEFAULT` marks required fields.

    The text below a field is its annotation's `description`."""
    hints = fields_of(section)
    texts = {name: text for cls in reversed(section.__mro__) for name, text in _texts_below(cls).items()}
    for field in msgspec.structs.fields(section):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        hint, path = hints[field.name], f"{prefix}{field.name}"
        text = texts.get(field.name)
        yield path, Annotated[hint, msgspec.Meta(description=text)] if text else hint, default
        nested = struct_of(hint)
        if nested is not None:
            yield from walk(nested, f"{path}{'[]' if get_origin(_strip(hint)[0]) is tuple else ''}.")


@cache
def _texts_below(section: type) -> dict[str, str]:
    """Return the text below each field of the class body; empty without the source."""
    try:
        [found] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    for field, below in pairwise(found.body if isinstance(found, ast.ClassDef) else ()):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
