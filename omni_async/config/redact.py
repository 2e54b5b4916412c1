"""Removes credentials from configurations and texts, and turns texts into one line without control characters.

Recipes name environment variables as `env:NAME`, and run folders contain masks. `resolve_references` replaces
`env:NAME` when a part that needs the secret is built.

A secret is recognised by its context: the value of a key named like a secret (`api_key`, `Authorization`), the user and
password of a URL, a query value named like a secret, the text after `Bearer`. A foreign text (a scorer's exception) may
quote a secret without such a context. A caller that knows the configuration therefore passes its `secrets_in`.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote

import msgspec

MASK = "***"
REFERENCE = "env:"  # a value `env:NAME` names the variable that holds a secret; it is no secret
SHORTEST = 4  # masking a shorter secret would mask half of any text
_OF_KEYS = (
    "access|account|api|app|auth|client|consumer|encryption|functions|licen[cs]e|master|private|secret|shared|signing"
    "|ssh|storage|subscription"
)
_SECRET_KEY = re.compile(
    r"(?:.*_)?(?:jwt|pwd|o?auth|authorization|cookies?|bearer|sig)"
    rf"|.*(?:(?:{_OF_KEYS})_?keys?|secrets?|tokens?|passwords?|passwd|passphrases?|credentials?|signature)",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")

# A name before an equals sign. In a query, more names mean a secret: `?key=`, `?AWSAccessKeyId=`, `?token_v2=`. The
# lengths are bounded, so that the time for a hostile text is linear in its length.
_NAME = re.compile(r"(?:(?P<query>[?&])|(?<![?&\w]))(?P<name>[\w.%\[\]-]{1,120})=")
_QUERY_KEY = re.compile(r"(?i)token|key|passw|secret|signature|credential")
_QUERY_VALUE, _VALUE = re.compile(r"[^&#\s]+"), re.compile(r"[^\s&,;]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=\S*[\d+/=_.-])[\w+/=.~-]{16,}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret_key(key: str, value: Any = "") -> bool:
    """Return whether `value` is a credential by its key: `hf_token`, `X-Api-Key`, `headers[Authorization]`.

    Under `tokens` and `max_tokens` texts are credentials, and numbers are counts."""
    last = re.split(r"[.\[]", key.rstrip("[]"))[-1]
    name = _CAMEL.sub("_", last).replace("-", "_")
    return _SECRET_KEY.fullmatch(name) is not None and (not name.lower().endswith("tokens") or _has_text(value))


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Mask credentials in `text`: the `secrets`, as they are or encoded once, and everything like a secret.

    The latter are a URL's user and password, query values and assignments named like secrets, and bearer tokens."""
    forms = {form for secret in secrets if secret for form in _forms(secret)}
    if forms:
        text = re.sub("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), MASK, text)
    text = _BEARER.sub(rf"\1\2{MASK}", _USERINFO.sub(f"{MASK}@", text))
    kept, at = [], 0
    for value in _named_values(text):
        kept += [text[at : value.start()], MASK]
        at = value.end()
    return "".join([*kept, text[at:]])


def redact(value: Any) -> Any:
    """Apply `redact_text` to a tree of dicts, lists and scalars.

    Values under keys named like secrets are masked whole, except null and references."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {key: _masked(item) if is_secret_key(str(key), item) else redact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def shown(value: Any) -> str:
    """Return a value of a recipe for an error message, redacted and cut off after 200 characters."""
    text = repr(redact(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def secrets_in(value: Any) -> frozenset[str]:
    """Return every credential of a tree as it may appear elsewhere: percent-encoded credentials also decoded."""
    return frozenset(found for found in _secrets(value, False) if len(found) >= SHORTEST)


def one_line(text: str, longest: int = 10_000) -> str:
    """Return `text` as one line without control characters, cut off after `longest` characters.

    Line ends become spaces, other control characters their escapes."""
    text = text.strip()
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        c if c.isprintable() else " " if c in "\t\n\r" else c.encode("unicode_escape").decode() for c in text
    )


def resolve_references(value: Any, where: str) -> Any:
    """Return a tree of plain values with every `env:NAME` replaced by the environment's value.

    Raises ValueError, one line that begins with `where`, for an unset variable and for a mask."""
    if isinstance(value, dict):
        return {key: resolve_references(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(item, where) for item in value]
    if value == MASK:
        raise ValueError(
            f"{where}: a masked credential, as in a run folder's config.yaml; give it again, or name it as env:NAME"
        )
    if not isinstance(value, str) or not value.startswith(REFERENCE):
        return value
    variable = value.removeprefix(REFERENCE)
    found = os.environ.get(variable)
    if not found:
        raise ValueError(f"{where}: {value!r} names an environment variable that is not set; set {variable}")
    return found


def with_secrets(section: Any, where: str) -> Any:
    """Return a section of settings with its references replaced, and anything else unchanged.

    Raises ValueError like `resolve_references`."""
    if not isinstance(section, msgspec.Struct):
        return section
    return msgspec.convert(resolve_references(msgspec.to_builtins(section), where), type(section))


def _has_text(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_text, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str)


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret as libraries quote it: percent-encoded, escaped as in JSON and Python's `repr`, in base64."""
    data = secret.encode("utf-8", "surrogatepass")
    yield from (secret, quote(data), quote(data, safe=""), quote_plus(data))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
    yield from (b64encode(data).decode().rstrip("="), urlsafe_b64encode(data).decode().rstrip("="))


def _named_values(text: str) -> Iterator[re.Match[str]]:
    """Yield the values in `text` with secret names, also inside the values of other names."""
    at = 0
    while match := _NAME.search(text, at):
        at, name = match.end(), unquote(match["name"])
        if not is_secret_key(name) and not (match["query"] and _QUERY_KEY.search(name)):
            continue
        if value := (_QUERY_VALUE if match["query"] else _VALUE).match(text, at):
            at = value.end()
            if not (name.lower().endswith("tokens") and value[0].strip("\"'()[]{}<>.:").isdecimal()):
                yield value


def _masked(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.startswith(REFERENCE)):
        return value
    return MASK


def _secrets(value: Any, under_secret_key: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, under_secret_key or is_secret_key(str(key), item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, under_secret_key)
    elif (
        under_secret_key and not isinstance(value, bool) and value is not None and not str(value).startswith(REFERENCE)
    ):
        yield str(value)
    elif isinstance(value, str):
        for match in _USERINFO.finditer(value):
            userinfo = match[0][:-1]
            user, _, password = userinfo.partition(":")
            yield from {password or user, unquote(password or user)}
        for match in _named_values(value):
            yield from {match[0], unquote(match[0])}
