"""Provides the forms in which libraries quote a text."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable
from urllib.parse import quote, quote_plus

Encoder = Callable[[str], str]


def all_escaped(text: str) -> str:
    """Escapes all characters as UTF-16 code units, as JSON does."""
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


ENCODERS: dict[str, Encoder] = {
    "itself": lambda text: text,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 without padding": lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
    "base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64 in lines": lambda text: base64.encodebytes(text.encode()).decode(),
    "base64 of UTF-16": lambda text: base64.b64encode(text.encode("utf-16-le")).decode(),
    "percent": lambda text: quote(text, safe=""),
    "percent, lower case": lambda text: "".join(
        f"%{b:02x}" if b > 127 or not chr(b).isalnum() else chr(b) for b in text.encode()
    ),
    "percent, every byte": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "form": quote_plus,
    "hex": lambda text: text.encode().hex(),
    "HEX": lambda text: text.encode().hex().upper(),
    "hex with colons": lambda text: text.encode().hex(":"),
    "hex dump": lambda text: ", ".join(f"0x{byte:02x}" for byte in text.encode()),
    "JSON": json.dumps,
    "JSON with slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "JSON, every character": all_escaped,
    "JavaScript": lambda text: "".join(f"\\u{{{ord(character):x}}}" for character in text),
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda text: repr(text.encode()),
    "bytes, every one": lambda text: "".join(f"\\x{byte:02x}" for byte in text.encode()),
    "octal": lambda text: "".join(f"\\{byte:03o}" for byte in text.encode()),
    "HTML": html.escape,
    "HTML, decimal": lambda text: "".join(f"&#{ord(character)};" for character in text),
    "HTML, hex": lambda text: "".join(f"&#x{ord(character):X};" for character in text),
}
