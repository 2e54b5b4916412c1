"""Describes in words the values that a field allows: for error messages and for the generated reference."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_BOUNDS = (
    ("ge", ">="),
    ("gt", ">"),
    ("le", "<="),
    ("lt", "<"),
    ("multiple_of", "multiple of"),
    ("min_length", "length >="),
    ("pattern", "matching"),
)


def _strip(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    if get_origin(annotation) is Annotated:
        base, *metas = get_args(annotation)
        inner, more = _strip(base)
        return inner, [*more, *(m for m in metas if isinstance(m, msgspec.Meta))]
    return annotation, []


def _shown(bound: Any) -> str:
    """Format 1000000.0 as 1000000, 1e+12 as 1e12."""
    return f"{bound:.12g}".replace("e+", "e") if isinstance(bound, float) else str(bound)


def _bound(meta: msgspec.Meta, key: str, word: str) -> str:
    why = (meta.extra or {}).get("why")
    return f"of {why}" if key == "pattern" and why else f"{word} {_shown(getattr(meta, key))}"


def describe(annotation: Any, value: Any = None) -> str:
    """Describe the allowed values of an annotation: `float > 0 or null`, `one of 'ray', 'inprocess'`, `list of 2 int`.

    Bounds that only keep absurd values out are named where `value` may have left them."""
    base, metas = _strip(annotation)
    origin, args = get_origin(base), get_args(base)
    bounds = [_bound(m, key, word) for m in metas for key, word in _BOUNDS if _matters(m, key, value)]
    if origin is Literal:
        text = "one of " + ", ".join(repr(a) for a in args)
    elif origin in (Union, types.UnionType):
        text = " or ".join(describe(a, value) for a in args)
    elif origin is tuple:
        text = (
            f"list of {describe(args[0], value)}"
            if args[-1] is Ellipsis
            else f"list of {len(args)} {describe(args[0], value)}"
        )
    elif base is type(None):
        text = "null"
    elif base is Any or origin is dict or (isinstance(base, type) and issubclass(base, msgspec.Struct)):
        text = "mapping"
    else:
        text = getattr(base, "__name__", str(base))
    return ", ".join([f"{text} {bounds[0]}", *bounds[1:]]) if bounds else text


def description(annotation: Any) -> str:
    """Return the documentation attached to a field, or an empty string."""
    return next((m.description for m in reversed(_strip(annotation)[1]) if m.description), "")


def _matters(meta: msgspec.Meta, key: str, value: Any) -> bool:
    if getattr(meta, key) is None:
        return False
    if not (meta.extra or {}).get("generous"):
        return True
    return _is_above(meta, value) if key == "le" else key != "pattern" or isinstance(value, str)


def _is_above(meta: msgspec.Meta, value: Any) -> bool:
    return isinstance(value, int | float) and meta.le is not None and value > meta.le


def reason(annotation: Any, value: Any) -> str:
    """Return the reason why `value` is too large; empty where the bound needs none."""
    return next(
        (str(why) for m in _strip(annotation)[1] if (why := (m.extra or {}).get("why")) and _is_above(m, value)), ""
    )


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the section a field holds (through Annotated, Optional and tuple), if it holds one."""
    base, _ = _strip(annotation)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        return base
    return next((found for a in get_args(base) if (found := struct_of(a)) is not None), None)


def _items_of(annotation: Any) -> tuple[Any, ...]:
    """Return the arguments of a list-like field's tuple (through Annotated and Optional); empty for any other field."""
    base, _ = _strip(annotation)
    if get_origin(base) in (Union, types.UnionType):
        return next((items for member in get_args(base) if (items := _items_of(member))), ())
    return get_args(base) if get_origin(base) is tuple else ()


def fields_of(section: type[msgspec.Struct]) -> dict[str, Any]:
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
    """Yield (path, annotation, default) of every field, depth first; `msgspec.NODEFAULT` marks required fields."""
    hints = fields_of(section)
    for field in msgspec.structs.fields(section):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        path = f"{prefix}{field.name}"
        yield path, hints[field.name], default
        nested = struct_of(hints[field.name])
        if nested is not None:
            is_list = get_origin(_strip(hints[field.name])[0]) is tuple
            yield from walk(nested, f"{path}{'[]' if is_list else ''}.")
