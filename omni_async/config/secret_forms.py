"""Finds known secrets in a text, in every encoding that libraries use.

A secret may be plain, percent-encoded (URLs), escaped (JSON, Python's `repr`, HTML), in base64 or in hex, or in nested
encodings. Escapes are undone repeatedly, on a copy that records the source of each byte. For base64 and hex, the
encoded secret is searched for, at every offset that it may have in the encoded bytes. A compressed or encrypted secret
is not found.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html.entities import html5
from typing import NamedTuple
from urllib.parse import quote

# Nested escapes are undone in every order, such as a JSON body, quoted in JSON, in a Python repr. The bounds limit the
# time for a hostile text.
_DEEPEST = 5  # an escaped secret inside four layers of escapes
_MOST_VIEWS = 40
_HEX = rb"[0-9A-Fa-f]"
_PERCENT = re.compile(rb"%(HH)".replace(b"H", _HEX))
_ENTITY = re.compile(
    rb"&(?:#(?P<decimal>[0-9]{1,7});|#[xX](?P<hex>H{1,6});|(?P<name>[A-Za-z][0-9A-Za-z]{1,30};))".replace(b"H", _HEX)
)
_BACKSLASH = re.compile(
    rb"\\(?:u(?P<high>[dD][89abAB]HH)\\u(?P<low>[dD][c-fC-F]HH)|u(?P<u4>HHHH)|u\{(?P<braced>H{1,6})\}|U(?P<u8>HHHHHHHH)"
    rb"|x(?P<byte>HH)|(?P<octal>[0-3][0-7]{2})|(?P<simple>[abfnrtv])|(?P<same>[^0-9A-Za-z]))".replace(b"H", _HEX)
)
_SIMPLE = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_BETWEEN_HEX = re.compile(rb"0x|[\s:,;-]+")
_LINE_ENDS = re.compile(rb"\s+")
_STANDARD = bytes.maketrans(b"-_", b"+/")


class _View(NamedTuple):
    """The decoded bytes of a text; byte number i comes from its characters `starts[i]` to `ends[i]`."""

    data: bytes
    starts: Sequence[int]
    ends: Sequence[int]


class _Needle(NamedTuple):
    """Bytes to search for. `before` and `after`: numbers of adjacent characters that contain more of its bits."""

    data: bytes
    before: int = 0
    after: int = 0


def find(text: str, secrets: Iterable[str]) -> list[tuple[int, int]]:
    """Return the places of `secrets` in `text`, as ordered ranges of characters that do not overlap."""
    given = {secret for secret in secrets if secret}
    if not given:
        return []
    plain = [
        _Needle(form.encode("utf-8", "surrogatepass"))
        for form in given | {secret.replace(" ", "+") for secret in given}
    ]
    encoded = [data for secret in given for data in _to_encode(secret)]
    in_hex = [_Needle(data.hex().encode()) for data in encoded]
    in_base64 = [needle for data in encoded for needle in _base64(data)]
    spans: list[tuple[int, int]] = []
    for view in _views(text):
        spans += _found(view, plain)
        spans += _found(_rewritten(view._replace(data=view.data.lower()), _BETWEEN_HEX, lambda _: b""), in_hex)
        spans += _found(
            _rewritten(view._replace(data=view.data.translate(_STANDARD)), _LINE_ENDS, lambda _: b""), in_base64
        )
    return _merged(spans)


# ---- the text, with escapes undone -----------------------------------------------------------------------------------


def _views(text: str) -> Iterator[_View]:
    layer, seen = [_written(text)], set[bytes]()
    for _ in range(_DEEPEST + 1):
        below: list[_View] = []
        for view in layer:
            if view.data not in seen and len(seen) < _MOST_VIEWS:
                seen.add(view.data)
                yield view
                below += [_rewritten(view, pattern, undone) for pattern, undone in _ESCAPES]
        layer = below


def _written(text: str) -> _View:
    if text.isascii():
        return _View(text.encode(), range(len(text)), range(1, len(text) + 1))
    pieces = [character.encode("utf-8", "surrogatepass") for character in text]
    starts = [at for at, piece in enumerate(pieces) for _ in piece]
    return _View(b"".join(pieces), starts, [at + 1 for at in starts])


def _rewritten(view: _View, pattern: re.Pattern[bytes], becomes: Callable[[re.Match[bytes]], bytes]) -> _View:
    """Replace every match; the source of each byte of a replacement is the whole match."""
    data: list[bytes] = []
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    for match in pattern.finditer(view.data):
        new = becomes(match)
        data += [view.data[at : match.start()], new]
        starts += [*view.starts[at : match.start()], *[view.starts[match.start()]] * len(new)]
        ends += [*view.ends[at : match.start()], *[view.ends[match.end() - 1]] * len(new)]
        at = match.end()
    if at == 0:
        return view
    return _View(b"".join([*data, view.data[at:]]), [*starts, *view.starts[at:]], [*ends, *view.ends[at:]])


def _unquoted(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 16)])


def _unescaped(match: re.Match[bytes]) -> bytes:
    """Undo an escape of HTML."""
    if found := match["decimal"]:
        return _character(int(found))
    if found := match["hex"]:
        return _character(int(found, 16))
    return html5.get(match["name"].decode("ascii"), match[0].decode("ascii")).encode()


def _as_bytes(match: re.Match[bytes]) -> bytes:
    r"""Undo an escape of JSON, or of the repr of bytes, where `\xe9` is one byte."""
    if found := match["byte"]:
        return bytes([int(found, 16)])
    if found := match["octal"]:
        return bytes([int(found, 8)])
    if match["high"]:
        return bytes.fromhex((match["high"] + match["low"]).decode()).decode("utf-16-be").encode()
    if found := match["u4"] or match["braced"] or match["u8"]:
        return _character(int(found, 16))
    return bytes([_SIMPLE[match["simple"][0]]]) if match["simple"] else match["same"]


def _as_text(match: re.Match[bytes]) -> bytes:
    r"""Undo an escape of the repr of a text, where `\xe9` is a character."""
    return _character(int(match["byte"], 16)) if match["byte"] else _as_bytes(match)


def _character(number: int) -> bytes:
    return chr(number).encode("utf-8", "surrogatepass") if number <= 0x10FFFF else b""


_ESCAPES = ((_PERCENT, _unquoted), (_BACKSLASH, _as_bytes), (_BACKSLASH, _as_text), (_ENTITY, _unescaped))


# ---- the secret, encoded ---------------------------------------------------------------------------------------------


def _to_encode(secret: str) -> set[bytes]:
    """Return the byte strings that an encoder may have received for the secret."""
    plain = secret.encode("utf-8", "surrogatepass")
    escaped = {
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        quote(plain),
        quote(plain, safe=""),
    }
    return {plain, secret.encode("utf-16-le", "surrogatepass")} | {
        form.encode("utf-8", "surrogatepass") for form in escaped
    }


def _base64(data: bytes) -> Iterator[_Needle]:
    """Yield the base64 characters of `data` that do not depend on neighbouring bytes, for each of three offsets."""
    for shift, first in ((0, 0), (1, 2), (2, 3)):
        last, rest = divmod(8 * (shift + len(data)), 6)
        encoded = binascii.b2a_base64(bytes(shift) + data, newline=False)
        yield _Needle(encoded[first:last], int(shift > 0), int(rest > 0))


# ---- both ------------------------------------------------------------------------------------------------------------


def _found(view: _View, needles: Iterable[_Needle]) -> Iterator[tuple[int, int]]:
    for needle in needles:
        at = view.data.find(needle.data)
        while at >= 0:
            first, last = max(0, at - needle.before), min(len(view.data), at + len(needle.data) + needle.after)
            yield view.starts[first], view.ends[last - 1]
            at = view.data.find(needle.data, at + len(needle.data))


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
