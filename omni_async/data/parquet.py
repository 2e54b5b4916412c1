"""Reads parquet files from elsewhere within bounds: a few hundred bytes can expand to gigabytes.

A page may be compressed a thousandfold, a dictionary repeats a value for some bits a row, and nulls take no bytes. The
headers of pages are read first (the footer may be wrong). Then rows are read in batches sized by the largest pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from omni_async.config import ConfigError

_PAGE = 2**26  # bytes; a larger page has at least a twentieth of them in the file
_MOST_RATIO = 20
_PAGES = 2**28  # bytes of a page of every column
_MOST_CHUNKS = 100_000  # columns of all row groups
_MOST_PAGES = 2**20  # of a column in a row group
_BATCH = 2**26  # bytes
_BATCH_ROWS = 1024
_DEEPEST = 50  # levels of nesting
_WIDEST = 2**16  # bytes that a type gives every value, nulls included
_WIDEST_IN_LIST = 64  # a list of few bytes in the file has millions of nulls
_HEADER, _LONGEST_HEADER = 2**8, 2**24  # bytes of a page's header: usual, and maximum
_BUFFER = 2**20
_BYTE_ARRAY, _FIXED = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
# PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY, DELTA_LENGTH_BYTE_ARRAY: encodings whose values do not depend on others.
_APART = (0, 2, 8, 6)


class Pages(NamedTuple):
    """Largest sizes of a column of a row group: bytes of its largest page, and values, nulls included."""

    largest: int
    num_values: int


class Bounds(NamedTuple):
    """Maxima of a table: rows; columns, those in structs included; bytes of a row's text; bytes of its images; values.

    `values` counts the values in lists of a row group."""

    rows: int
    columns: int
    row: int
    images: int
    values: int

    def of_row(self, schema: Any, columns: list[str]) -> int:
        """Return the most bytes of a row with these columns."""
        return self.row + (self.images if any(_is_binary(schema.field(name).type) for name in columns) else 0)


class _Chunk(NamedTuple):
    """The begin and end of a column of a row group in the file."""

    begin: int
    end: int


def plain_rows(
    file: BinaryIO, where: str, bounds: Bounds, binary: frozenset[str] = frozenset()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows as plain values, with their numbers.

    Args:
        file: open for reading.
        where: the file's name; the beginning of an error.
        bounds: the maxima.
        binary: the columns whose binary values are read: bytes, or a struct with `bytes`.

    Raises:
        ConfigError: it is no parquet file, or exceeds these bounds."""
    import pyarrow as pa

    try:
        yield from _rows(file, where, bounds, binary)
    except (pa.ArrowException, OSError, ValueError, LookupError, RecursionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        why = " ".join(str(error).split())
        raise ConfigError(f"{where} cannot be read as parquet: {why}") from None


def _rows(file: BinaryIO, where: str, bounds: Bounds, binary: frozenset[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow.parquet as pq

    footer = pq.read_metadata(file)
    leaves = [footer.schema.column(i) for i in range(footer.num_columns)]
    if len(leaves) > bounds.columns:
        raise ConfigError(f"{where}: {len(leaves)} columns, at most {bounds.columns} are read")
    if any(leaf.path.count(".") > 2 * _DEEPEST for leaf in leaves):
        raise ConfigError(f"{where}: columns nest more than {_DEEPEST} levels deep")
    groups = range(footer.num_row_groups)
    chunks = _chunks(file, len(leaves), where)
    if (num_rows := sum(footer.row_group(group).num_rows for group in groups)) > bounds.rows:
        raise ConfigError(f"{where}: {num_rows} rows, at most {bounds.rows} are read; split it")
    # A list may repeat a value without end; as a dictionary entry it is in memory once.
    texts = [leaf.path for leaf in leaves if leaf.max_repetition_level and leaf.physical_type == _BYTE_ARRAY]
    parquet = pq.ParquetFile(file, read_dictionary=texts, pre_buffer=False, buffer_size=_BUFFER)
    columns = read_columns(parquet.schema_arrow, where, binary)
    used = [i for i, leaf in enumerate(leaves) if any(f"{leaf.path}.".startswith(f"{name}.") for name in columns)]
    has_lists = any(leaves[i].max_repetition_level for i in used)
    # Nulls of a fixed size take that size in memory, and no bytes in the file.
    widths = sum(leaves[i].length for i in used if leaves[i].physical_type == _FIXED)
    largest_row = bounds.of_row(parquet.schema_arrow, columns)
    number = values = 0
    for group in groups:
        held = widths
        for leaf, chunk in ((leaves[i], chunks[group][i]) for i in used):
            found = _check_pages(file, chunk, leaf, f"{where}: column {leaf.path}")
            held += found.largest
            values += found.num_values * leaf.max_repetition_level
        if held > _PAGES:
            raise ConfigError(f"{where}: pages of all columns have {held} bytes, at most {_PAGES} are read")
        if values > bounds.values:
            raise ConfigError(f"{where}: lists of {values} values, at most {bounds.values} are read; split it")
        size = 1 if has_lists else max(1, min(_BATCH_ROWS, _BATCH // max(1, held)))
        batches = parquet.iter_batches(batch_size=size, row_groups=[group], columns=columns, use_threads=False)
        for batch in batches:
            for i in range(batch.num_rows):
                row = batch.slice(i, 1)
                if size == 1 and (length := sum(map(num_bytes, row.columns))) > largest_row:
                    raise ConfigError(f"{where}: row {number} has {length} bytes, at most {largest_row} are read")
                yield number, row.to_pylist()[0]
                number += 1


def read_columns(schema: Any, where: str, binary: frozenset[str]) -> list[str]:
    """Return the columns to read: all except binary columns that `binary` does not name.

    Raises ConfigError, which begins with `where`, if a column's values are not plain."""
    columns = [field.name for field in schema if field.name in binary or not _is_binary(field.type)]
    for name in columns:
        if (count := schema.names.count(name)) > 1:
            raise ConfigError(f"{where}: {count} columns have the name {name[:80]!r}")
        require_plain(schema.field(name).type, f"{where}: column {name}")
    return columns


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind):
        return _is_binary(kind.value_type)
    if types.is_struct(kind) and (place := kind.get_field_index("bytes")) >= 0:
        return _is_binary(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _check_pages(file: BinaryIO, chunk: _Chunk, leaf: Any, where: str) -> Pages:
    """Read the headers of a column's pages in a row group, and return their largest sizes.

    Raises ConfigError, beginning with `where`, if a page is too large for its bytes in the file, or there are too many
    pages."""
    place, end = chunk
    grows = leaf.max_repetition_level and leaf.physical_type == _BYTE_ARRAY
    largest = num_values = 0
    for _ in range(_MOST_PAGES):
        if place >= end:
            return Pages(largest, num_values)
        header, length = _header(file, place, where)
        held, stored = header.get(2, 0), header.get(3, 0)
        data = header.get(5) or header.get(8) or {}
        numbers = [held, stored, data.get(1, 0) if isinstance(data, dict) else None]
        if any(not isinstance(number, int) or number < 0 for number in numbers):
            raise ConfigError(f"{where}: the header of a page is damaged")
        if held > _PAGE and held > _MOST_RATIO * stored:
            raise ConfigError(f"{where}: a page of {stored} bytes encodes {held}; write it with smaller pages")
        if grows and data and data.get(2 if 5 in header else 4, 0) not in _APART:
            raise ConfigError(f"{where}: texts in lists are in delta encoding; write it without")
        largest, num_values = max(largest, held), num_values + data.get(1, 0)
        place += length + stored
    raise ConfigError(f"{where}: more than {_MOST_PAGES} pages in a row group")


def _chunks(file: BinaryIO, num_columns: int, where: str) -> list[list[_Chunk]]:
    """Return the place of each column of every row group.

    This parses the footer itself, because pyarrow ends the process if a column's metadata is damaged."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(os.pread(file.fileno(), 4, size - 8), "little")
    try:
        footer, _ = _struct(os.pread(file.fileno(), length, size - 8 - length), 0, 0)
        groups = [group[1] for group in footer.get(4) or []]
        if sum(map(len, groups)) > _MOST_CHUNKS:
            raise ConfigError(f"{where}: more than {_MOST_CHUNKS} columns in row groups; write larger ones")
        found = [[_chunk(column) for column in group] for group in groups]
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: its footer is damaged") from None
    if any(len(group) != num_columns for group in found) or any(one.end > size for group in found for one in group):
        raise ConfigError(f"{where}: its footer is damaged, or the file was cut off")
    return found


def _chunk(column: dict[int, Any]) -> _Chunk:
    if 1 in column:
        raise ValueError("in another file")
    about = column[3]
    begin = min(start for start in (about[9], about.get(11, 0)) if start > 0)
    return _Chunk(begin, begin + max(0, about[7]))


def require_plain(kind: Any, where: str, in_list: bool = False) -> None:
    """Raise ConfigError if a value of the type is not plain, or is large even if it is null."""
    from pyarrow import types

    if types.is_map(kind) or types.is_run_end_encoded(kind) or types.is_union(kind) or types.is_list_view(kind):
        raise ConfigError(f"{where}: expected plain values, got {kind}")
    if types.is_fixed_size_binary(kind) and kind.byte_width > (_WIDEST_IN_LIST if in_list else _WIDEST):
        most = _WIDEST_IN_LIST if in_list else _WIDEST
        raise ConfigError(f"{where}: values of {kind.byte_width} bytes, at most {most} are read")
    if types.is_fixed_size_list(kind):  # in such a list even a null takes the full size
        raise ConfigError(f"{where}: expected a list of any length, got {kind}")
    if types.is_dictionary(kind):
        require_plain(kind.value_type, where, in_list)
    elif types.is_list(kind) or types.is_large_list(kind):
        require_plain(kind.value_type, where, in_list=True)
    elif types.is_struct(kind):
        for field in kind:
            require_plain(field.type, where, in_list)


def num_bytes(array: Any) -> int:
    """Return the bytes of an array's values; a dictionary entry counts as often as it occurs, a list's value as one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_struct(kind):
        return sum(map(num_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        flat = array.flatten()
        return num_bytes(flat) + len(flat)
    if pa.types.is_dictionary(kind):
        used = pc.cast(pc.binary_length(array.dictionary), pa.int64()).take(array.indices)
        return pc.sum(used).as_py() or 0
    return int(array.nbytes)


# ---- Thrift's compact protocol, the encoding of footers and page headers ---------------------------------------------


def _header(file: BinaryIO, place: int, where: str) -> tuple[dict[int, Any], int]:
    """Return the fields of the struct at a place of a file, by number, and its length in bytes."""
    for length in (_HEADER, _LONGEST_HEADER):
        try:
            return _struct(os.pread(file.fileno(), length, place), 0, 0)
        except IndexError:  # it is longer
            continue
        except (ValueError, OSError):
            break
    raise ConfigError(f"{where}: the header of a page is damaged or cut off")


def _struct(content: bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    found: dict[int, Any] = {}
    number = 0
    while kind := content[place]:
        place += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, place = _integer(content, place)
        found[number], place = _value(content, place, kind & 15, depth)
    return found, place + 1


def _value(content: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > 20:
        raise ValueError("nested too deeply")
    match kind:
        case 1 | 2:  # booleans have no bytes
            return kind == 1, place
        case 3:
            return content[place], place + 1
        case 4 | 5 | 6:
            return _integer(content, place)
        case 7:
            return None, place + 8
        case 8:
            length, place = _varint(content, place)
            if place + length > len(content):
                raise IndexError
            return None, place + length
        case 9 | 10:
            size, kind = content[place] >> 4, content[place] & 15
            place += 1
            if size == 15:
                size, place = _varint(content, place)
            items = []
            for _ in range(size):
                item, place = _value(content, place, 3 if kind in (1, 2) else kind, depth + 1)
                if kind == 12:
                    items.append(item)
            return items, place
        case 12:
            return _struct(content, place, depth + 1)
    raise ValueError(f"type {kind}")


def _integer(content: bytes, place: int) -> tuple[int, int]:
    number, place = _varint(content, place)
    return number >> 1 ^ -(number & 1), place


def _varint(content: bytes, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        number |= (content[place] & 127) << shift
        place += 1
        if content[place - 1] < 128:
            return number, place
    raise ValueError("a number of more than 64 bits")
