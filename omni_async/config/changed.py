"""Finds the values of a configuration that differ from the defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.config.section import Section


def changed(section: Section) -> dict[str, Any]:
    """Return the values of a section that differ from the defaults, as plain values; lists of sections item by item."""
    found = {}
    for field in msgspec.structs.fields(section):
        value, default = getattr(section, field.name), field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return changed(value)
    if isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
        return [_plain(item) for item in value]
    return msgspec.to_builtins(value)
