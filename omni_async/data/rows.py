"""Decodes one row of a table, from JSON, CSV or a columnar file.

A row is bounded in characters, bytes and levels of nesting. Errors are a ConfigError of one line that begins with the
place of the row.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json, num_values
from omni_async.data.image_files import one_line

EXAMPLE = 'an object such as {"prompt": "a cat"}'
DEEPEST = 50  # levels of nesting in a row, as in a recipe: packing a prompt into a message recurses through them
LONGEST_LINE = 2**20  # characters of a row, targets and other keys included: they travel with every sample


def object_of(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ConfigError, which begins with `where`, if it is invalid."""
    fields = decode(line, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected {EXAMPLE}, got {line[:200]}")
    _require_plain_object(fields, line, where)
    return fields


def decode(line: str, where: str) -> Any:
    """Decode JSON from a user. Raises ConfigError, one line that begins with `where`, if it is invalid."""
    try:
        return decode_json(line.encode("utf-8", "surrogatepass"))
    except msgspec.DecodeError as error:
        why = str(error)
        if "nested" in why:
            why = f"nested more than {DEEPEST} levels deep"
        if "truncated" in why and "\\ud" in line.lower():  # the decoder waits for the other half
            why = "half a surrogate pair (like \\ud800) is no character"
        raise ConfigError(f"{where}: not valid JSON: {why}") from None


def _require_plain_object(fields: dict[str, Any], line: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if an object nests too deeply, or its JSON repeats a key."""
    if _depth_exceeds(fields, DEEPEST):
        raise ConfigError(f"{where}: nested more than {DEEPEST} levels deep")
    if line.count(":") != len(fields):  # equal: every colon belongs to a present key, and nothing is nested
        require_unique_keys(line, where)


def _depth_exceeds(value: Any, deepest: int) -> bool:
    """Return whether lists and objects are nested deeper than `deepest` levels, without recursion."""
    level: list[Any] = [value]
    for _ in range(deepest):
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def require_unique_keys(line: str, where: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{where}: key {twice[:80]!r} given twice")
        return found

    json.loads(line, object_pairs_hook=unique)


def plain_item(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a text, or {EXAMPLE}, got {repr(item)[:200]}")
    if _depth_exceeds(item, DEEPEST):
        raise ConfigError(f"{where}: nested more than {DEEPEST} levels deep")
    _encoded(item, where)
    return item


def cells_of(row: dict[str, str], where: str) -> dict[str, Any]:
    """Return the cells of a CSV; cells with lists and objects are JSON."""
    found: dict[str, Any] = dict(row)
    for key in ("metadata", "images"):
        if key in row:
            found[key] = decode(row[key], f"{where}: {key}")
            _require_plain_object({key: found[key]}, row[key], f"{where}: {key}")
    return found


def plain_row(cells: dict[str, Any], where: str, prompt: str | None) -> tuple[dict[str, Any], int, int]:
    """Return a row as JSON values, its bytes and number of values.

    Images stay bytes. Empty cells are left out, except in the column `prompt`."""
    images = {name: _image(cell) for name, cell in cells.items() if _holds_bytes(cell)}
    kept = {name: cell for name, cell in cells.items() if cell is not None or name == prompt}
    text = _encoded({name: cell for name, cell in kept.items() if name not in images}, where)
    size = sum(len(one) for cell in images.values() for one in (cell if isinstance(cell, list) else [cell]) if one)
    images = {name: cell for name, cell in images.items() if cell is not None}
    row = msgspec.json.decode(text)
    if _depth_exceeds(row, DEEPEST):
        raise ConfigError(f"{where}: nested more than {DEEPEST} levels deep")
    return row | images, len(text) + size, num_values(text)


def _holds_bytes(cell: Any) -> bool:
    if isinstance(cell, list):
        return any(map(_holds_bytes, cell))
    return isinstance(cell, bytes) or (isinstance(cell, dict) and "bytes" in cell and cell.keys() <= {"bytes", "path"})


def _image(cell: Any) -> Any:
    """Return the bytes, or the path, of an image in the form of Hugging Face datasets."""
    if isinstance(cell, list):
        return [_image(one) for one in cell]
    return cell["bytes"] or cell.get("path") if isinstance(cell, dict) else cell


def _encoded(row: dict[str, Any], where: str) -> bytes:
    """Return the row as JSON. ConfigError if it is too long, or not representable in JSON."""
    try:
        text = msgspec.json.encode(row)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from None
    if len(text) > 4 * LONGEST_LINE:
        raise ConfigError(f"{where}: the row has {len(text)} bytes, more than {LONGEST_LINE} characters")
    return text
