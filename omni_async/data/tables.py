"""Reads tables that a user names, for prompts, preference pairs and `omni-async score`.

A table is a file (`.txt`, `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`) or a folder (`folders`). It has one
row per sample. `open_table` finds it; `Table.rows` reads one row at a time, which `rows` decodes.

Every row is bounded before it is decoded, and so is the total. Errors are a ConfigError of one line that begins with
the place of the row.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import msgspec

from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json
from omni_async.config.reading import OutsideError, open_file
from omni_async.data.image_files import one_line
from omni_async.data.rows import LONGEST_LINE, cells_of, object_of, plain_item, plain_row, require_unique_keys

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
LEADS_OUT = "leads out of its folder; copy the file into it, or name it on the command line"
_LARGEST_FILE = 2**30  # bytes of a text, and of all rows of another file: they are held in memory
_LARGEST_JSON = 2**28  # bytes of a `.json` file, which is decoded as a whole
_LARGEST_IMAGES = 2**26  # bytes of the images inside a row
_MOST_ROWS = 1_000_000  # of a file whose rows may take no bytes
_MOST_VALUES = 20_000_000  # of all rows: each takes up to 100 bytes of memory
_MOST_COLUMNS = 1000
# Fields whose binary cells are kept: encoded images. Binary cells of other columns are not read.
_BINARY = ("image", "images", "video", "audio")

Columns = Mapping[str, str | None]  # names of columns by field, as `data.columns`
NO_COLUMNS: Columns = MappingProxyType({})


class NoColumnError(ConfigError):
    """A column that `data.columns` names is in no row."""


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
            NoColumnError: a named column is in no row."""
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
        """Raise NoColumnError if a column is in no row of a table that has rows."""
        for field, column in self._unseen.items() if self._others else ():
            has = ", ".join(self._others)[:300]
            problem = f"{name}: no row has {column!r}, which data.columns.{field} names; it has {has}"
            merged = len(self._others) == 1 and any(separator in has for separator in ",;\t|")
            hint = ": separate columns by commas in .csv, by tabs in .tsv" if merged else ""
            raise NoColumnError(f"{problem}{hint}")


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
    while content := file.readline(4 * LONGEST_LINE + 1):  # a character has four bytes at most
        number += 1
        where = f"{name}:{number}"
        if len(content) > 4 * LONGEST_LINE:
            raise ConfigError(f"{where}: the line has more than {LONGEST_LINE} characters")
        values += content.count(b",") + content.count(b"[") + content.count(b"{")
        if values > _MOST_VALUES:
            raise ConfigError(f"{where}: more than {_MOST_VALUES} values; split it")
        try:
            text = content.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            utf16 = number == 1 and content.startswith((b"\xff\xfe", b"\xfe\xff"))
            hint = "; it is UTF-16, which `iconv -f UTF-16 -t UTF-8` converts" if utf16 else ""
            raise ConfigError(f"{where}: not UTF-8 text: {byte}: {error.reason}{hint}") from None
        if len(text) > LONGEST_LINE:
            raise ConfigError(f"{where}: the line has {len(text)} characters, more than {LONGEST_LINE}")
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
    require_unique_keys(content.decode("utf-8-sig"), name)
    for number, item in enumerate(found):
        where = f"{name}: row {number}"
        yield Row(where, number, partial(plain_item, item, where))


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
            quoted = 'a cell with a quotation mark is quoted: "a ""b"""'
            remedy = "write long texts as .jsonl" if "field limit" in str(error) else quoted
            raise ConfigError(f"{where}: no CSV: {error}; {remedy}") from None
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
        yield Row(where, number, partial(cells_of, row, where))


# ---- columnar formats ------------------------------------------------------------------------------------------------


def _columnar(file: BinaryIO, name: str, names: Names, arrow: bool = False) -> Iterator[Row]:
    from omni_async.data.arrow_files import arrow_rows
    from omni_async.data.parquet import Bounds, plain_rows

    bounds = Bounds(_MOST_ROWS, _MOST_COLUMNS, 4 * LONGEST_LINE, _LARGEST_IMAGES, _MOST_VALUES)
    held = values = 0
    for number, cells in (arrow_rows if arrow else plain_rows)(file, name, bounds, names.binary):
        where = f"{name}: row {number}"
        row, size, num = plain_row(cells, where, names.prompt)
        held += size
        values += num
        if held > _LARGEST_FILE or values > _MOST_VALUES:
            allowed = f"{_LARGEST_FILE} bytes and {_MOST_VALUES} values"
            raise ConfigError(f"{where}: a table has at most {allowed}; split it")
        yield Row(where, number, partial(dict, row))


_READERS: dict[str, Callable[[BinaryIO, str, Names], Iterator[Row]]] = {
    ".txt": _text,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _columnar,
    ".arrow": partial(_columnar, arrow=True),
}
