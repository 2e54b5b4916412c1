"""Reads tables that a user names, for prompts, preference pairs and `omni-async score`.

A table is a file (`.txt`, `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`) or a folder (`folders`). It has one
row per sample. `open_table` finds it; `Table.rows` reads one row at a time.

Every row is bounded before it is decoded: in characters, values, levels of nesting and columns. The total is bounded,
too. Errors are a ConfigError of one line that begins with the place of the row.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import msgspec

from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json, num_values
from omni_async.config.reading import OutsideError, open_file
from omni_async.data.image_files import one_line

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
EXAMPLE = 'an object such as {"prompt": "a cat"}'
LEADS_OUT = "leads out of its folder; copy the file into it, or name it on the command line"
DEEPEST = 50  # levels of nesting in a row, as in a recipe: packing a prompt into a message recurses through them
_LARGEST_FILE = 2**30  # bytes of a text, and of all rows of another file: they are held in memory
_LARGEST_JSON = 2**28  # bytes of a `.json` file, which is decoded as a whole
_LONGEST_LINE = 2**20  # characters of a row, targets and other keys included: they travel with every sample
_LARGEST_IMAGES = 2**26  # bytes of the images inside a row
_MOST_ROWS = 1_000_000  # of a file whose rows may take no bytes
_MOST_VALUES = 20_000_000  # of all rows: each takes up to 100 bytes of memory
_MOST_COLUMNS = 1000
# Fields whose binary cells are kept: encoded images. Binary cells of other columns are not read.
_BINARY = ("image", "images", "video", "audio")

Columns = Mapping[str, str | None]  # names of columns by field, as `data.columns`
NO_COLUMNS: Columns = MappingProxyType({})


class Row(NamedTuple):
    """One row: its place for errors, its number, and the function that decodes its fields or raises ConfigError."""

    where: str
    number: int
    fields: Callable[[], dict[str, Any]]


class Table(NamedTuple):
    """A table that was found, but not read.

    name: the beginning of its errors.
    place: what a row's number counts: `line`, `row` or `file`.
    folder: paths in the table are relative to it.
    root: the folder that these paths must not leave, links included.
    read: returns its rows under the columns' own names."""

    name: str
    place: str
    folder: Path
    root: Path
    read: Callable[[Names], Iterator[Row]]

    def rows(self, columns: Columns = NO_COLUMNS, binary: Sequence[str] = _BINARY) -> Iterator[Row]:
        """Yield the rows. A row's fields must be read before the next row is requested.

        Args:
            columns: names of columns by field, as `data.columns`; a field whose column is null is left out.
            binary: the fields whose binary cells are read.

        Raises:
            ConfigError: a named column is in no row."""
        names = Names(columns, binary)
        if not columns:
            yield from self.read(names)
            return
        for where, number, fields in self.read(names):
            yield Row(where, number, lambda fields=fields: names.applied(fields()))  # type: ignore[misc]
        names.require_seen(self.name)


class Names:
    """The columns of the fields of a table, and which of them were seen."""

    def __init__(self, columns: Columns, binary: Sequence[str]) -> None:
        self._columns = columns
        # Its empty cells are read: a row without a prompt is an error.
        self.prompt = columns.get("prompt", "prompt")
        # The columns whose binary cells are read.
        self.binary = frozenset(column for name in binary if (column := columns.get(name, name)) is not None)
        self._unseen = {field: column for field, column in columns.items() if column is not None}
        self._others: dict[str, None] = {}

    def applied(self, cells: dict[str, Any]) -> dict[str, Any]:
        """Return a row by the names of fields. A table that has a field under its own name needs no other name."""
        taken = {*self._columns, *self._columns.values()}
        fields = {name: cell for name, cell in cells.items() if name not in taken}
        for field, column in self._columns.items():
            source = column if column in cells else field
            if column is not None and source in cells:
                fields[field] = cells[source]
                self._unseen.pop(field, None)
        if self._unseen and len(self._others) < 20:
            self._others |= dict.fromkeys(cells)
        return fields

    def require_seen(self, name: str) -> None:
        """Raise ConfigError if a column is in no row of a table that has rows."""
        for field, column in self._unseen.items() if self._others else ():
            has = ", ".join(self._others)[:300]
            problem = f"{name}: no row has {column!r}, which data.columns.{field} names; it has {has}"
            merged = len(self._others) == 1 and any(separator in has for separator in ",;\t|")
            raise ConfigError(f"{problem}: separate columns by commas in .csv, by tabs in .tsv" if merged else problem)


def open_table(path: str | Path, key: str = "", within: Path | None = None) -> Table:
    """Find the table at a path.

    Args:
        path: a file or a folder.
        key: the configuration path that named it, for messages; empty: the user named it.
        within: the folder that a file must not leave, links included; None if the user named it.

    Raises:
        ConfigError: no such file, or no format with a reader."""
    path = Path(path)
    name = f"{key}: {path}" if key else str(path)
    suffix = path.suffix.lower()
    try:
        folder = path.is_dir() or not path.exists()
        if "\0" in name:
            raise ValueError("embedded null byte")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(f"{name} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if folder and suffix not in SUFFIXES:
        from omni_async.data.folders import folder_table

        return folder_table(path, name, key)
    if suffix not in SUFFIXES:
        unpack = "; unpack it" if suffix in (".gz", ".zip", ".xz", ".bz2", ".zst", ".tar") else ""
        got = f"got {suffix or 'no suffix'}{unpack}"
        raise ConfigError(f"{name}: expected a folder or one of {', '.join(SUFFIXES)}, {got}")
    return file_table(path, name, key, within)


def file_table(path: Path, name: str, key: str, within: Path | None, root: Path | None = None) -> Table:
    """Return the table of a file with one of the suffixes."""
    suffix = path.suffix.lower()
    parent = Path(os.path.realpath(path)).parent if root is None else path.parent
    place = "row" if suffix in (".json", ".parquet", ".arrow") else "line"
    return Table(name, place, parent, root or parent, partial(_of_file, path, key, name, within, _READERS[suffix]))


def _of_file(
    path: Path, key: str, name: str, within: Path | None, reader: Callable[..., Iterator[Row]], names: Names
) -> Iterator[Row]:
    try:
        with open_file(path, within) as file:
            yield from reader(file, name, names)
    except FileNotFoundError:
        raise ConfigError(f"{key}: no such file: {path}" if key else f"{path}: no such file") from None
    except OutsideError:
        raise ConfigError(f"{name} {LEADS_OUT}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} cannot be read: {getattr(error, 'strerror', None) or one_line(error)}") from None


# ---- formats of text -------------------------------------------------------------------------------------------------


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, from 1; only a line feed ends a line.

    Python's splitlines() also cuts at U+2028 and form feeds, which may occur in a prompt, and in a JSON string."""
    if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
        raise ConfigError(f"{name} is larger than {_LARGEST_FILE} bytes")
    number = values = 0
    while content := file.readline(4 * _LONGEST_LINE + 1):  # a character has four bytes at most
        number += 1
        where = f"{name}:{number}"
        if len(content) > 4 * _LONGEST_LINE:
            raise ConfigError(f"{where}: the line has more than {_LONGEST_LINE} characters")
        values += content.count(b",") + content.count(b"[") + content.count(b"{")
        if values > _MOST_VALUES:
            raise ConfigError(f"{where}: more than {_MOST_VALUES} values; split it")
        try:
            text = content.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            raise ConfigError(f"{where}: not UTF-8 text: {byte}: {error.reason}") from None
        if len(text) > _LONGEST_LINE:
            raise ConfigError(f"{where}: the line has {len(text)} characters, more than {_LONGEST_LINE}")
        if "\0" in text:
            raise ConfigError(f"{where}: holds the character U+0000, where tokenizers may end a text; is this a text?")
        yield number, text


def _text(file: BinaryIO, name: str, names: Names) -> Iterator[Row]:
    for number, line in _lines(file, name):
        if text := line.strip():
            yield Row(f"{name}:{number}", number, partial(dict, prompt=text))


def _jsonl(file: BinaryIO, name: str, names: Names) -> Iterator[Row]:
    for number, line in _lines(file, name):
        if line.strip():
            where = f"{name}:{number}"
            yield Row(where, number, partial(object_of, line, where))


def _json(file: BinaryIO, name: str, names: Names) -> Iterator[Row]:
    """Yield the objects, or the prompts, of a JSON list."""
    content = file.read(_LARGEST_JSON + 1)
    if len(content) > _LARGEST_JSON:
        raise ConfigError(f"{name} is larger than {_LARGEST_JSON} bytes; write an object a line, as .jsonl")
    try:
        found = decode_json(content.removeprefix(b"\xef\xbb\xbf"), most=_MOST_VALUES)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: not valid JSON: {error}; objects without a list around them are .jsonl") from None
    if not isinstance(found, list):
        got = f"got a JSON {type(found).__name__}; put the rows into [ ]"
        raise ConfigError(f"{name}: expected a list of objects or of prompts, {got}")
    _require_unique_keys(content.decode("utf-8-sig"), name)
    for number, item in enumerate(found):
        where = f"{name}: row {number}"
        yield Row(where, number, partial(_plain_item, item, where))


def _plain_item(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a text, or {EXAMPLE}, got {repr(item)[:200]}")
    if _depth_exceeds(item, DEEPEST):
        raise ConfigError(f"{where}: nested more than {DEEPEST} levels deep")
    _encoded(item, where)
    return item


def _csv(file: BinaryIO, name: str, names: Names, delimiter: str = ",") -> Iterator[Row]:
    # A line may contain several rows that end only with a carriage return.
    lines = (part for _, line in _lines(file, name) for part in io.StringIO(line, newline=""))
    reader = csv.reader(lines, strict=True, delimiter=delimiter)  # strict: an unterminated quotation is an error
    columns: list[str] = []
    while True:
        number = reader.line_num + 1
        where = f"{name}:{number}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f'{where}: no CSV: {error}; a cell with a quotation mark is quoted: "a ""b"""') from None
        if cells is None:
            return
        if not cells:
            continue
        if not columns:
            columns = cells
            if len(columns) > _MOST_COLUMNS:
                raise ConfigError(f"{where}: {len(columns)} columns, at most {_MOST_COLUMNS} are read")
            # Spreadsheets may append cells for unnamed columns to their lines.
            if twice := next((name for name in columns if name and columns.count(name) > 1), None):
                raise ConfigError(f"{where}: two columns have the name {twice[:80]!r}")
            continue
        if len(cells) > len(columns):
            raise ConfigError(f"{where}: more cells than the first line has columns")
        row = {key: cell for key, cell in zip(columns, cells, strict=False) if cell or key == names.prompt}
        yield Row(where, number, partial(_cells, row, where))


def _cells(row: dict[str, str], where: str) -> dict[str, Any]:
    """Return the cells of a CSV; cells with lists and objects are JSON."""
    found: dict[str, Any] = dict(row)
    for key in ("metadata", "images"):
        if key in row:
            found[key] = decode(row[key], f"{where}: {key}")
            require_plain_object({key: found[key]}, row[key], f"{where}: {key}")
    return found


def object_of(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ConfigError, which begins with `where`, if it is invalid."""
    fields = decode(line, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected {EXAMPLE}, got {line[:200]}")
    require_plain_object(fields, line, where)
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


def require_plain_object(fields: dict[str, Any], line: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if an object nests too deeply, or its JSON repeats a key."""
    if _depth_exceeds(fields, DEEPEST):
        raise ConfigError(f"{where}: nested more than {DEEPEST} levels deep")
    if line.count(":") != len(fields):  # equal: every colon belongs to a present key, and nothing is nested
        _require_unique_keys(line, where)


def _depth_exceeds(value: Any, deepest: int) -> bool:
    """Return whether lists and objects are nested deeper than `deepest` levels, without recursion."""
    level: list[Any] = [value]
    for _ in range(deepest):
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _require_unique_keys(line: str, where: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{where}: key {twice[:80]!r} given twice")
        return found

    json.loads(line, object_pairs_hook=unique)


# ---- columnar formats ------------------------------------------------------------------------------------------------


def _columnar(file: BinaryIO, name: str, names: Names, arrow: bool = False) -> Iterator[Row]:
    from omni_async.data.arrow_files import arrow_rows
    from omni_async.data.parquet import Bounds, plain_rows

    bounds = Bounds(_MOST_ROWS, _MOST_COLUMNS, 4 * _LONGEST_LINE, _LARGEST_IMAGES, _MOST_VALUES)
    held = values = 0
    for number, cells in (arrow_rows if arrow else plain_rows)(file, name, bounds, names.binary):
        where = f"{name}: row {number}"
        row, size, num = _plain_row(cells, where, names.prompt)
        held += size
        values += num
        if held > _LARGEST_FILE or values > _MOST_VALUES:
            allowed = f"{_LARGEST_FILE} bytes and {_MOST_VALUES} values"
            raise ConfigError(f"{where}: a table has at most {allowed}; split it")
        yield Row(where, number, partial(dict, row))


def _plain_row(cells: dict[str, Any], where: str, prompt: str | None) -> tuple[dict[str, Any], int, int]:
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
    if len(text) > 4 * _LONGEST_LINE:
        raise ConfigError(f"{where}: the row has {len(text)} bytes, more than {_LONGEST_LINE} characters")
    return text


_READERS: dict[str, Callable[[BinaryIO, str, Names], Iterator[Row]]] = {
    ".txt": _text,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _columnar,
    ".arrow": partial(_columnar, arrow=True),
}
