"""Reads the rows of tables for `omni-async score`: `.jsonl`, `.csv` and `.parquet`.

Rows are read one at a time. Each is bounded before it is decoded: in characters, values, levels of nesting and columns.
The total of a table's rows is bounded, too. Raises a ConfigError of one line with the number of the row's first line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from omni_async.config import ConfigError
from omni_async.config.reading import OutsideError, open_file
from omni_async.data.image_files import one_line
from omni_async.data.prompts import decode, require_plain_object

SUFFIXES = (".jsonl", ".csv", ".parquet")
LEADS_OUT = "leads out of its folder; copy the file into it, or name it on the command line"
_LARGEST = 2**28  # bytes of all rows as JSON: they are held in memory
_LONGEST_ROW = 2**20  # characters, as of a line of a prompt file
_MOST_ROWS = 1_000_000
_MOST_VALUES = 20_000_000  # of all rows: each takes up to 100 bytes of memory
_MOST_COLUMNS = 1000


def rows(table: Path, within: Path | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, each with its place; empty cells are omitted.

    `within`: the folder that must contain the table, links included. Raises ConfigError."""
    read = {".jsonl": _jsonl, ".csv": _csv}.get(table.suffix.lower(), _parquet)
    num_rows = held = values = 0
    try:
        with open_file(table, within) as file:
            for where, row in read(file, table):
                num_rows += 1
                text = _encoded(row, where)
                held += len(text)
                values += text.count(b",") + text.count(b"[") + text.count(b"{")
                if num_rows > _MOST_ROWS or held > _LARGEST or values > _MOST_VALUES:
                    allowed = f"{_MOST_ROWS} rows, {_LARGEST} bytes and {_MOST_VALUES} values"
                    raise ConfigError(f"{where}: a table has at most {allowed}; split it")
                yield where, row
    except OutsideError:
        raise ConfigError(f"{table}: {LEADS_OUT}") from None
    except OSError as error:
        raise ConfigError(f"{table}: {error.strerror or one_line(error)}") from None


def _encoded(row: dict[str, Any], where: str) -> bytes:
    """Return the row as JSON. ConfigError if it is too long, or not representable in JSON."""
    try:
        text = msgspec.json.encode(row)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from None
    if len(text) > 4 * _LONGEST_ROW:  # a character has four bytes at most
        raise ConfigError(f"{where}: the row has {len(text)} bytes, more than {_LONGEST_ROW} characters")
    return text


def _lines(file: BinaryIO, table: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, from 1; only a line feed ends a line."""
    number = 0
    while content := file.readline(4 * _LONGEST_ROW + 1):
        number += 1
        where = f"{table}:{number}"
        if len(content) > 4 * _LONGEST_ROW:
            raise ConfigError(f"{where}: the line has more than {_LONGEST_ROW} characters")
        try:
            text = content.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x}"
            raise ConfigError(f"{where}: not UTF-8 text: {byte}: {error.reason}") from None
        if len(text) > _LONGEST_ROW:
            raise ConfigError(f"{where}: the line has {len(text)} characters, more than {_LONGEST_ROW}")
        if "\0" in text:
            raise ConfigError(f"{where}: holds the character U+0000; is this a text file?")
        yield number, text


def _jsonl(file: BinaryIO, table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in _lines(file, table):
        if not line.strip():
            continue
        where = f"{table}:{number}"
        row = decode(line, where)
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object")
        require_plain_object(row, line, where)
        yield where, {key: cell for key, cell in row.items() if cell is not None}


def _csv(file: BinaryIO, table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # A line may contain several rows that end only with a carriage return.
    lines = (part for _, line in _lines(file, table) for part in io.StringIO(line, newline=""))
    reader = csv.reader(lines, strict=True)  # strict: an unterminated quotation is an error
    columns: list[str] = []
    while True:
        where = f"{table}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{where}: no CSV: {error}") from None
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
        yield where, {key: _cell(key, cell, where) for key, cell in zip(columns, cells, strict=False) if cell}


def _cell(key: str, cell: str, where: str) -> Any:
    """Return a cell of a CSV; cells with lists and objects are JSON."""
    if key not in ("metadata", "images"):
        return cell
    found = decode(cell, f"{where}: {key}")
    require_plain_object({key: found}, cell, f"{where}: {key}")
    return found


def _parquet(file: BinaryIO, table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from omni_async.data.parquet import plain_rows

    for number, row in plain_rows(file, str(table), _MOST_ROWS, _MOST_COLUMNS, 4 * _LONGEST_ROW, _MOST_VALUES):
        yield f"{table}: row {number}", {key: cell for key, cell in row.items() if cell is not None}
