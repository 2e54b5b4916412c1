"""Decodes JSON from elsewhere within bounds: a few bytes can stand for many times their size in memory."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# A value takes up to 100 bytes of memory and as little as two in a file.
MOST_VALUES = 1_000_000


def decode_json(content: bytes, kind: type[T] | Any = Any, most: int = MOST_VALUES) -> Any:
    """Decode JSON as `kind`.

    Args:
        content: UTF-8.
        kind: what msgspec decodes to.
        most: how many values there may be. Commas and brackets are counted, also those in texts, so a little less is
            allowed than stands here.

    Raises msgspec.DecodeError: it is not JSON, not of `kind`, nested too deeply, or has too many values."""
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise msgspec.DecodeError(f"more than {most} values")
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: {error}") from None
