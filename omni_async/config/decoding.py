"""Decodes JSON and MessagePack from elsewhere within bounds.

A few bytes can stand for many times their size in memory."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# A value takes up to 100 bytes of memory and as little as two in a file.
MOST_VALUES = 1_000_000
# By a value's first byte: how many bytes its length has, how many follow in any case, and, times its length, how many
# values and how many bytes follow.
_HEADS = (
    dict.fromkeys(range(0xC0, 0xC4), (0, 0, 0, 0))
    | {0xC4 + i: (2**i, 0, 0, 1) for i in range(3)}  # bytes
    | {0xC7 + i: (2**i, 1, 0, 1) for i in range(3)}  # extensions
    | {0xCA + i: (0, 4 + 4 * i, 0, 0) for i in range(2)}  # floats
    | {0xCC + i: (0, 2 ** (i % 4), 0, 0) for i in range(8)}  # integers
    | {0xD4 + i: (0, 1 + 2**i, 0, 0) for i in range(5)}  # extensions
    | {0xD9 + i: (2**i, 0, 0, 1) for i in range(3)}  # texts
    | {0xDC + i: (2 + 2 * i, 0, 1, 0) for i in range(2)}  # arrays
    | {0xDE + i: (2 + 2 * i, 0, 2, 0) for i in range(2)}  # maps
)


def decode_json(content: bytes | bytearray, kind: type[T] | Any = Any, most: int = MOST_VALUES) -> Any:
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


def decode_msgpack(content: bytes | bytearray, kind: type[T] | Any = Any, most: int = MOST_VALUES) -> Any:
    """Decode MessagePack as `kind`.

    Args:
        content: one value.
        kind: what msgspec decodes to.
        most: how many values there may be, keys included.

    Raises msgspec.DecodeError: it is not MessagePack, not of `kind`, nested too deeply, or has too many values."""
    if _exceeds(content, most):
        raise msgspec.DecodeError(f"more than {most} values")
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: {error}") from None


def _exceeds(content: bytes | bytearray, most: int) -> bool:
    """Return whether MessagePack has, or claims to have, more than `most` values. Steps over what is not counted."""
    at, seen, left, size = 0, 0, 1, len(content)
    while left and at < size:
        seen += 1
        if seen + left > most + 1:
            return True
        first = content[at]
        at += 1
        left -= 1
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x9F:
            left += (first & 0x0F) * (2 if first <= 0x8F else 1)
        elif first <= 0xBF:
            at += first & 0x1F
        else:
            width, fixed, values, each = _HEADS[first]
            length = int.from_bytes(content[at : at + width], "big")
            at += width + fixed + length * each
            left += length * values
    return False
