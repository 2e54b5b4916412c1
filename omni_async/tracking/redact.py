"""Keeps credentials out of what a run leaves behind."""

from __future__ import annotations

import re
from typing import Any

_MASK = "***"
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY_SECRET = re.compile(r"(?i)([?&][^=&#\s]*(?:token|key|password|secret)[^=&#\s]*=)[^&#\s]+")
_SECRET_KEY = re.compile(r"(?i)^(?:.*_)?(?:api_?key|access_?key|token|password|passwd|secret|authorization)$")


def redact_text(text: str) -> str:
    """`text` with the user and password of every URL in it masked, and its query values named like secrets."""
    return _QUERY_SECRET.sub(rf"\1{_MASK}", _USERINFO.sub(f"{_MASK}@", text))


def redact(value: Any) -> Any:
    """The same for a tree of dicts, lists and scalars; string values under keys named like secrets are masked whole."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {k: _MASK if isinstance(v, str) and _SECRET_KEY.match(str(k).rpartition(".")[2]) else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value
