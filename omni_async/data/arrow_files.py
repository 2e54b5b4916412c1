"""Reads `.arrow` files within bounds: Arrow's IPC format, which Hugging Face `datasets` saves.

The file is mapped into memory, and its columns are used in place. Compressed files are refused, because a few hundred
bytes can expand to gigabytes; `datasets` writes none.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, BinaryIO

from omni_async.config import ConfigError
from omni_async.data.parquet import Bounds, num_bytes, read_columns

_MAGIC = b"ARROW1\0\0"
_COMPRESSION = 3  # the field of a RecordBatch
_MOST_MESSAGES = 2**20


def arrow_rows(
    file: BinaryIO, where: str, bounds: Bounds, binary: frozenset[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows as plain values, with their numbers; the arguments and errors are `parquet.plain_rows`'."""
    import pyarrow as pa

    try:
        yield from _rows(file, where, bounds, binary)
    except (pa.ArrowException, OSError, ValueError, LookupError, RecursionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} cannot be read as Arrow: {' '.join(str(error).split())}") from None


def _rows(file: BinaryIO, where: str, bounds: Bounds, binary: frozenset[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa

    mapped = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if mapped[: len(_MAGIC)].to_pybytes() == _MAGIC:  # of a file, whose messages are those of a stream
        mapped = mapped[len(_MAGIC) :]
    _require_uncompressed(mapped, where)
    stream = pa.ipc.open_stream(pa.BufferReader(mapped))
    if len(stream.schema) > bounds.columns:
        raise ConfigError(f"{where}: {len(stream.schema)} columns, at most {bounds.columns} are read")
    columns = read_columns(stream.schema, where, binary)
    number, largest_row = 0, bounds.of_row(stream.schema, columns)
    for batch in stream:
        if number + batch.num_rows > bounds.rows:
            raise ConfigError(f"{where}: more than {bounds.rows} rows; split it")
        batch = batch.select(columns)
        batch.validate(full=True)
        for i in range(batch.num_rows):
            row = batch.slice(i, 1)
            if (length := sum(map(num_bytes, row.columns))) > largest_row:
                raise ConfigError(f"{where}: row {number} has {length} bytes, at most {largest_row} are read")
            yield number, row.to_pylist()[0]
            number += 1


def _require_uncompressed(mapped: Any, where: str) -> None:
    """Raise ConfigError if a batch is compressed, before anything is decompressed."""
    import pyarrow as pa

    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(mapped))
    for _ in range(_MOST_MESSAGES):
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type != "schema" and _is_compressed(message.metadata.to_pybytes(), message.type == "dictionary"):
            raise ConfigError(f"{where}: its columns are compressed; write it without compression, or as .parquet")
    raise ConfigError(f"{where}: more than {_MOST_MESSAGES} messages; write larger batches")


# ---- flatbuffers, the encoding of a message's header: a table has offsets to its fields -----------------------------


def _is_compressed(header: bytes, is_dictionary: bool) -> bool:
    batch = _field(header, _number(header, 0, 4), 2)  # Message.header
    if is_dictionary and batch is not None:
        batch = _field(header, batch, 1)  # DictionaryBatch.data
    return batch is not None and _field(header, batch, _COMPRESSION) is not None


def _field(header: bytes, table: int, field: int) -> int | None:
    """Return the place that a table's field refers to; None if the table lacks it."""
    offsets = table - int.from_bytes(header[table : table + 4], "little", signed=True)
    entry = 4 + 2 * field
    offset = _number(header, offsets + entry, 2) if entry < _number(header, offsets, 2) else 0
    return table + offset + _number(header, table + offset, 4) if offset else None


def _number(header: bytes, place: int, size: int) -> int:
    if not 0 <= place <= len(header) - size:
        raise ValueError("the header of a message is damaged")
    return int.from_bytes(header[place : place + size], "little")
