"""Decodes foreign JSON and MessagePack within bounds, because a few bytes can expand to many times their size."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# A value takes up to 100 bytes of memory and as little as two in a file.
MOST_VALUES = 1_000_000
# By a value's first byte: (bytes of its length field, bytes that always follow, values per unit of length, bytes per
# unit of length).
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
_TEXTS = (0xD9, 0xDB)  # texts longer than 31 bytes
_CONTINUED = bytes(range(0x80, 0xC0))  # the bytes of a character of UTF-8 after its first


def decode_json(content: bytes | bytearray, kind: type[T] | Any = Any, most: int = MOST_VALUES) -> Any:
    """Decode JSON as `kind`.

    Args:
        content: UTF-8.
        kind: the type for msgspec.
        most: the largest number of values. Commas and brackets are counted, also inside texts, so slightly fewer are
            allowed.

    Raises msgspec.DecodeError if it is not JSON, not of `kind`, nested too deeply, or has too many values."""
    if num_values(content) > most:
        raise msgspec.DecodeError(f"more than {most} values")
    return _decoded(msgspec.json.decode, content, kind)


def num_values(content: bytes | bytearray) -> int:
    """Return an upper bound of the number of values in JSON, as `decode_json` counts them."""
    return sum(map(content.count, (b",", b"[", b"{")))


def decode_msgpack(
    content: bytes | bytearray, kind: type[T] | Any = Any, most: int = MOST_VALUES, longest: int | None = None
) -> Any:
    """Decode MessagePack as `kind`.

    Args:
        content: one value.
        kind: the type for msgspec.
        most: the largest number of values, keys included.
        longest: the largest number of characters in a text; None: no limit.

    Raises msgspec.DecodeError if it is not MessagePack, not of `kind`, nested too deeply, or has too many values or too
    long a text."""
    widening(content, most, longest)
    return _decoded(msgspec.msgpack.decode, content, kind)


def _decoded(decode: Any, content: bytes | bytearray, kind: Any) -> Any:
    """Decode; raise no exception other than msgspec.DecodeError."""
    try:
        return decode(content, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: {error}") from None


def widening(content: bytes | bytearray, most: int, longest: int | None = None) -> int:
    """Return how many bytes the texts of MessagePack may take in memory beyond their encoded size.

    Python gives each character of a text as many bytes as its widest character needs. Other values are skipped.

    Raises msgspec.DecodeError if MessagePack has, or claims to have, more than `most` values, or has a text of more
    than `longest` characters."""
    at, seen, left, size, wide = 0, 0, 1, len(content), 0
    while left and at < size:
        seen += 1
        if seen + left > most + 1:
            raise msgspec.DecodeError(f"more than {most} values")
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
            at += width
            if _TEXTS[0] <= first <= _TEXTS[1]:
                if longest is not None and length > longest:
                    _require_short(content, at, length, longest)
                if not content[at : at + length].isascii():
                    wide += 3 * length
            at += fixed + length * each
            left += length * values
    return wide


def _require_short(content: bytes | bytearray, at: int, length: int, longest: int) -> None:
    """Raise msgspec.DecodeError if a text of UTF-8 has more than `longest` characters."""
    if length > 4 * longest or len(content[at : at + length].translate(None, _CONTINUED)) > longest:
        raise msgspec.DecodeError(f"a text of more than {longest} characters")
