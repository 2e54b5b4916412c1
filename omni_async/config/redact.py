"""Removes credentials from configurations and texts, and turns texts into one line without control characters.

Recipes name environment variables as `env:NAME`, and run folders contain masks. `resolve_references` replaces
`env:NAME` when a part that needs the secret is built.

A secret is recognised by its context: the value of a key named like a secret (`api_key`, `Authorization`), the user and
password of a URL, a query value named like a secret, the text after `Bearer`. A foreign text (a scorer's exception) may
quote a secret without such a context, or encoded. A caller that knows the configuration therefore passes its
`secrets_in`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from omni_async.config import secret_forms

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


class _Syntax(NamedTuple):
    """A syntax for pairs of a name and a value in a text.

    `telling` matches names that are secret in this syntax, in addition to names that are secret everywhere. The
    patterns are bounded, so that the time for a hostile text is linear in its length."""

    names: re.Pattern[str]
    values: re.Pattern[str]
    telling: re.Pattern[str] | None = None

    def holds_secret(self, name: str, value: Any = "") -> bool:
        if name.lower().endswith("tokens") and not _has_text(value):
            return False
        return is_secret_key(name, value) or (self.telling is not None and self.telling.search(name) is not None)


# In a query, such names mostly mean a secret: `?key=`, `?AWSAccessKeyId=`, `?token_v2=`.
_QUERY = _Syntax(
    re.compile(r"[?&]([^=?&#\s]{1,120})="),
    re.compile(r"[^&#\s]+"),
    re.compile(r"(?i)token|key|passw|secret|signature|credential"),
)
_ASSIGNED = _Syntax(re.compile(r"(?<![?&\w])([\w.-]{1,120})="), re.compile(r"[^\s&,;]+"))
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=\S*[\d+/=_.-])[\w+/=.~-]{16,}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret_key(key: str, value: Any = "") -> bool:
    """Return whether `value` is a credential by its key: `hf_token`, `X-Api-Key`, `headers[Authorization]`.

    Under `tokens` and `max_tokens` texts are credentials, and numbers are counts."""
    last = re.split(r"[.\[]", key.rstrip("[]"))[-1]
    name = _CAMEL.sub("_", last).replace("-", "_")
    return _SECRET_KEY.fullmatch(name) is not None and (not name.lower().endswith("tokens") or _has_text(value))


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Mask credentials in `text`: the `secrets` in any form (see `secret_forms`), and everything like a secret.

    The latter are a URL's user and password, query values and assignments named like secrets, and bearer tokens."""
    text = _mask(text, secret_forms.find(text, secrets))
    text = _BEARER.sub(rf"\1\2{MASK}", _USERINFO.sub(f"{MASK}@", text))
    for syntax in (_QUERY, _ASSIGNED):
        text = _mask(text, (value.span() for value in _found(syntax, text)))
    return text


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


def _found(syntax: _Syntax, text: str) -> Iterator[re.Match[str]]:
    """Yield the values in `text` with secret names, also inside the values of other names."""
    at = 0
    while match := syntax.names.search(text, at):
        at, name = match.end(), unquote(match[1])
        if syntax.holds_secret(name) and (value := syntax.values.match(text, at)):
            at = value.end()
            if syntax.holds_secret(name, 0 if value[0].strip("\"'()[]{}<>.:").isdecimal() else ""):
                yield value


def _mask(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return the text with `MASK` in place of each range; the ranges are in order."""
    kept, at = [], 0
    for start, end in spans:
        kept += [text[at:start], MASK]
        at = end
    return "".join([*kept, text[at:]])


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
        for match in _found(_QUERY, value):
            yield from {match[0], unquote(match[0])}
