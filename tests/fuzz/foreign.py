"""Provides strategies for foreign input: any plain value, valid values of a struct, and valid files with changes."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from omni_async.checkpoint import CheckpointError
from omni_async.commands.bench.measure import NotMeasurableError
from omni_async.config import ConfigError
from omni_async.performance.profile import Profile, ServiceTime, TokenTimes
from omni_async.types import VersionSpans

DEEP = b"[" * 5000
NUMBERS = (0, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0)
_CONTROL = ("", " ", "\0", "a\nb", "\x1b[2J", "\u2028", "x" * 5000)
TEXTS = (*_CONTROL, "../../x", "/etc/passwd", "[/red]", "{x}", "%s", "null", "1e999", "***")

keys = st.text(max_size=8) | st.sampled_from(TEXTS)
numbers = st.integers() | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=20) | st.sampled_from(NUMBERS + TEXTS)
plain = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=10),
    bytes: st.binary(max_size=10),
    bool: st.booleans(),
    type(None): st.none(),
    msgspec.UnsetType: st.just(msgspec.UNSET),
    Any: st.none() | st.integers(0, 9) | st.text(max_size=5),
    VersionSpans: st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(VersionSpans.of),  # neighbours differ
    ServiceTime: st.builds(  # the mean of the quantiles is 1
        ServiceTime,
        st.floats(0, 1e9),
        st.floats(0, 1e9),
        st.floats(0, 9),
        st.sampled_from([(), (1.0,), (0.5, 1.5)]),
    ),
}
_SIMPLE[TokenTimes] = st.builds(
    TokenTimes,
    _SIMPLE[ServiceTime],
    st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple),  # an answer takes 1e11 s at most
    _SIMPLE[ServiceTime],
)


@cache
def of(annotation: Any) -> st.SearchStrategy[Any]:
    """Generates valid values of a type of our messages."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if origin is Annotated:
        return of(args[0]).map(lambda value: _inside(value, args[1]))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of, args))
    if origin is dict:
        return st.dictionaries(of(args[0]), of(args[1]), max_size=3)
    if origin is Sequence:  # it is received as a list
        return st.lists(of(args[0]), max_size=3)
    if origin is tuple:
        return st.lists(of(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(of, args))
    assert issubclass(annotation, msgspec.Struct), annotation
    hints = get_type_hints(annotation, include_extras=True)
    made = _profile if annotation is Profile else annotation
    return st.builds(made, **{name: of(hints[name]) for name in annotation.__struct_fields__})


def _profile(tokens: TokenTimes | msgspec.UnsetType, generate: ServiceTime, **stages: Any) -> Profile:
    """Makes a profile; its times of tokens determine that of a batch."""
    return Profile(tokens=tokens, generate=tokens.in_batches if isinstance(tokens, TokenTimes) else generate, **stages)


def _inside(value: Any, bounds: msgspec.Meta) -> Any:
    """Moves a number into its bounds; texts here are short."""
    if isinstance(value, str):
        return value
    low = -(2**40) if bounds.ge is None else bounds.ge
    highest = [2**40, *([] if bounds.le is None else [bounds.le]), *([] if bounds.lt is None else [bounds.lt - 1])]
    return max(low, min(abs(value), *highest))


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Replaces, removes, inserts or doubles a few bytes; or cuts off the end."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 8)))
        piece = draw(
            st.binary(max_size=8)
            | st.sampled_from([content[start:end] * 2, b'"', b"{", b"9" * 30, b"-", b"null", b"\xff" * 8])
        )
        content = content[:start] + piece + content[end:]
        if draw(st.integers(0, 7)) == 0:
            content = content[: draw(st.integers(0, len(content)))]
    return content


@st.composite
def altered(draw: st.DrawFn, tree: Any) -> Any:
    """Replaces, removes or adds one to three values of plain data."""
    tree = msgspec.json.decode(msgspec.json.encode(tree))
    for _ in range(draw(st.integers(1, 3))):
        here, key = tree, None
        parent: Any = None
        while isinstance(here, dict | list) and here and (parent is None or draw(st.integers(0, 3))):
            key = draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else draw(st.integers(0, len(here) - 1))
            parent, here = here, here[key]
        if parent is None:
            return draw(plain)
        match draw(st.integers(0, 5)):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[draw(keys)] = draw(plain)
            case _:
                parent[key] = draw(plain)
    return tree


def listing(folder: Path) -> dict[str, bytes]:
    """Lists all files and folders below a folder with their content, so that any write there shows."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


@contextmanager
def refusal_or_nothing(folder: Path) -> Iterator[None]:
    """Lets the block refuse what it reads, in one line; whatever it says, it writes nothing in the folder."""
    before = listing(folder)
    try:
        yield
    except (ConfigError, CheckpointError, NotMeasurableError) as error:
        assert 0 < len(str(error)) < 3000 and "\n" not in str(error)
    assert listing(folder) == before
