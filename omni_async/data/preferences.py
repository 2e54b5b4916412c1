"""Reads preference pairs from a table: all prompts at once, the images of one pair on request.

Columns: `prompt` (text), `chosen` and `rejected`. An image is an encoded PNG, JPEG or WebP image; a struct with `bytes`
and optionally `path`, as in Hugging Face datasets; or the path of an image file in the table's folder or below it.
Other columns are ignored. A parquet file is read as follows; the rows of any other table are held in memory.

Access to pairs is random, but parquet is not: to reach a row, its row group is decoded from the start, a row at a time
(some 10 us each). The next pair costs nothing extra, so files for shuffled training should have row groups of a hundred
rows rather than a million. Memory holds one row and its pages, whatever the size of the file, and however often a value
is repeated in it. Writers keep a page within some megabytes; the format itself limits it to 2 GiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omni_async.config import ConfigError
from omni_async.config.reading import real_path, require_file
from omni_async.data.bad_places import BadPlaces
from omni_async.data.image_files import MAX_IMAGE_BYTES, find_image, one_line, read_image
from omni_async.data.prompts import WholeCheck
from omni_async.data.tables import NO_COLUMNS, Columns, Table, open_table
from omni_async.types import Prompt

if TYPE_CHECKING:
    from omni_async.media import Media

_KEY = "data.preferences"
_COLUMNS = ("prompt", "chosen", "rejected")
_MAX_PATH_BYTES = 2**16
_MAX_PAIRS = 10_000_000  # every prompt is held in memory
_MAX_PROMPT_BYTES = 2**31  # of all prompts
_PIXELS_CHECKED = 2**29  # of images decoded before a run: some ten seconds on one core
_BUFFER_BYTES = 2**20
_DICTIONARY_ROWS = 1024


class PreferencePairs:
    """The pairs of one table, numbered by row from 0; every `ConfigError` is one line with file, row and column.

    Not thread-safe. Paths in the file are relative to its folder; a path that leads out of it, by `..` or by a link, is
    refused."""

    def __init__(self, path: str, columns: Columns = NO_COLUMNS) -> None:
        """Read only the footer of a parquet file, and any other table.

        `columns`: names of columns by field, as `data.columns`.
        Raises ConfigError if the table is missing or invalid, or a column is missing or of a wrong type."""
        self.path = path
        self._places: list[str] = []
        named = {field: columns.get(field) or field for field in _COLUMNS}
        if Path(path).suffix.lower() == ".parquet":
            self._folder = self._root = real_path(path).parent
            found = self._opened(path, named)
        else:
            found = self._held(open_table(path, _KEY), named)
        self._columns: dict[str, _Column | Any] = found

    def _opened(self, path: str, named: dict[str, str]) -> dict[str, _Column]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            require_file(path)  # pyarrow would also take a URL, or a folder
            # Without these two, pyarrow reads all columns of a row group before it returns the first batch.
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            schema = file.schema_arrow
        except FileNotFoundError:
            raise ConfigError(f"{_KEY}: no such file: {path}") from None
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that no file can have
            why = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{_KEY}: {path} cannot be read as parquet: {why}") from None
        leaves = (file.schema.column(i) for i in range(len(file.schema)))
        repeated = {leaf.path.split(".")[0] for leaf in leaves if leaf.max_repetition_level}
        for field, column in named.items():
            self._check_column(schema, field, column, repeated)
        self._require_rows(file.metadata.num_rows)
        return {field: _Column(file, path, column) for field, column in named.items()}

    def _held(self, table: Table, named: dict[str, str]) -> dict[str, Any]:
        """Return the columns of a table that is read entirely, as Arrow arrays."""
        import pyarrow as pa

        self._folder, self._root = table.folder, table.root
        cells: dict[str, list[Any]] = {field: [] for field in named}
        for where, number, fields in table.rows(named, binary=_COLUMNS):
            row = fields()
            if missing := [field for field in named if field not in row]:
                has = ", ".join(row)[:300]
                raise ConfigError(f"{where}: {missing[0]} is missing; expected prompt, chosen and rejected, got {has}")
            for field, column in cells.items():
                column.append(row[field])
            self._places.append(where if table.place != "row" else f"{table.name}: row {number}")
        self._require_rows(len(self._places))
        try:
            held = {field: pa.array(column) for field, column in cells.items()}
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise ConfigError(f"{table.name}: a column holds values of several kinds: {one_line(error)}") from None
        schema = pa.schema([(field, column.type) for field, column in held.items()])
        for field in held:
            self._check_column(schema, field, field, set())
        return held

    def _require_rows(self, number: int) -> None:
        self._num_rows = number
        if number == 0:
            raise ConfigError(f"{_KEY}: {self.path} holds no pairs; expected one a row")
        if number > _MAX_PAIRS:
            raise ConfigError(f"{_KEY}: {self.path} holds {number} pairs, at most {_MAX_PAIRS} are read; split it")

    def _cell(self, column: str, row: int) -> Any:
        found = self._columns[column]
        return found.cell(row) if isinstance(found, _Column) else found[row]

    def __len__(self) -> int:
        return self._num_rows

    def prompts(self, max_chars: int | None = None, whole: WholeCheck | None = None) -> list[Prompt]:
        """Return all prompts in order; `Prompt.index` is the pair's number.

        Reads one column.

        Args:
            max_chars: maximum number of characters of a prompt.
            whole: the model's requirements, checked once over all prompts.

        Raises:
            ConfigError: rows without a prompt, or whose prompt is too long or refused by `whole` (at most ten rows are
                named), or more than 2 GiB of prompts."""
        prompts: list[Prompt] = []
        held = 0
        bad = BadPlaces("row")
        for row in range(len(self)):
            value, where = _plain(self._cell("prompt", row)), self._where(row, "prompt")
            held += _size(value)
            if held > _MAX_PROMPT_BYTES:
                more = f"more than {_MAX_PROMPT_BYTES} bytes"
                raise ConfigError(f"{where}: the prompts up to here have {more}; split the file")
            with bad.noting(where, row):
                prompts.append(Prompt(row, _require_prompt(value, where, max_chars)))
        if whole is not None:
            for position, problem in whole(prompts).items():
                row = prompts[position].index
                bad.add(self._where(row, "prompt"), row, problem)
        bad.require_none()
        return prompts

    def check_images(self) -> str | None:
        """Decode the images of all pairs; in a large file only the first ones, with a returned note about the others.

        Raises ConfigError naming at most ten rows whose images cannot be decoded."""
        bad = BadPlaces("row")
        pixels = 0
        for row in range(len(self)):
            if pixels > _PIXELS_CHECKED:
                bad.require_none()
                return (
                    f"note: {_KEY}: {self.path}: the images of the first {row} of {len(self)} pairs were decoded; those"
                    " of the others are checked when they are read"
                )
            for column in _COLUMNS[1:]:
                cell, where = self._cell(column, row), self._where(row, column)
                with bad.noting(where, row):
                    image = self._image(cell, where).image
                    pixels += 0 if image is None else image.shape[1] * image.shape[2]
        bad.require_none()
        return None

    def media(self, pair: int) -> tuple[Media, Media]:
        """Return the chosen and the rejected image of a pair, each at its own size (`image_files.read_image`).

        Raises ConfigError if an image cannot be decoded, IndexError if the pair does not exist."""
        if not 0 <= pair < len(self):
            raise IndexError(f"pair {pair}: {self.path} has pairs 0..{len(self) - 1}")
        cells = ((self._cell(column, pair), self._where(pair, column)) for column in _COLUMNS[1:])
        chosen, rejected = (self._image(cell, where) for cell, where in cells)
        return chosen, rejected

    def _where(self, row: int, column: str) -> str:
        return f"{self._places[row] if self._places else f'{_KEY}: {self.path}: row {row}'}, column {column}"

    def _check_column(self, schema: Any, field: str, column: str, repeated: set[str]) -> None:
        import pyarrow as pa

        found = schema.names.count(column)
        if found != 1:
            problem = "is missing" if not found else f"occurs {found} times"
            more = "" if found else f"; name it, as data.columns.{field}=NAME"
            raise ConfigError(
                f"{_KEY}: {self.path}: column {column} {problem}; expected prompt, chosen and rejected, got"
                f" {', '.join(schema.names)}{more}"
            )
        kind = schema.field(column).type
        flat = kind.value_type if pa.types.is_dictionary(kind) else kind
        if field == "prompt":
            fits, expected = _is_text(flat), "text"
        else:
            if pa.types.is_struct(flat) and flat.get_field_index("bytes") >= 0:
                stored = flat.field("bytes").type
                fits = _is_bytes(stored) or pa.types.is_null(stored)  # all null: the images are given by path
            else:
                fits = _is_text(flat) or _is_bytes(flat)
            expected = "encoded images (binary, or a struct with binary `bytes`) or their paths (text)"
        if not fits or column in repeated:  # one row of a list is unbounded
            raise ConfigError(f"{_KEY}: {self.path}: column {column}: expected {expected}, got {kind}")

    def _image(self, cell: Any, where: str) -> Media:
        import pyarrow as pa

        value = _plain(cell)
        if pa.types.is_struct(value.type) and value.is_valid:
            has_path = value.type.get_field_index("path") >= 0
            value = _plain(value["path"] if has_path and not value["bytes"].is_valid else value["bytes"])
        if _is_bytes(value.type) and (size := _size(value)):
            if size > MAX_IMAGE_BYTES:
                raise ConfigError(f"{where}: the image has {size} bytes, at most {MAX_IMAGE_BYTES} are decoded")
            return read_image(memoryview(value.as_buffer()), where)
        if _is_text(value.type) and (size := _size(value)):
            if size > _MAX_PATH_BYTES:
                raise ConfigError(f"{where}: the path has {size} bytes, at most {_MAX_PATH_BYTES} are taken")
            file = find_image(self._folder, _text(value, where) or "", where, "the table's", self._root)
            return read_image(file, where, self._root)
        raise ConfigError(f"{where}: there is no image")


class _Column:
    """The cells of one column, read mostly in order."""

    def __init__(self, file: Any, path: str, name: str) -> None:
        import pyarrow as pa

        self._file, self._path, self._name = file, path, name
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self._starts = list(accumulate(sizes, initial=0))[:-1]
        # A batch repeats every value that a page, by a dictionary or by compression, holds once: only a single row has
        # a bound. A column that is an Arrow dictionary repeats nothing, but each batch has the whole dictionary, at
        # most 2 GiB: single rows would cost too much there.
        self._rows = _DICTIONARY_ROWS if pa.types.is_dictionary(file.schema_arrow.field(name).type) else 1
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._start = 0

    def cell(self, row: int) -> Any:
        """Return the row's Arrow scalar. Raises ConfigError if the row cannot be read."""
        group = bisect_right(self._starts, row) - 1
        if group != self._group or row < self._start:
            self._batches = self._read(group)
            self._group, self._batch, self._start = group, None, self._starts[group]
        try:
            while self._batch is None or row >= self._start + self._batch.num_rows:
                self._start += self._batch.num_rows if self._batch is not None else 0
                self._batch = next(self._batches, None)
                if self._batch is None:
                    raise ConfigError(f"{_KEY}: {self._path}: row {row} is missing, though the file's footer counts it")
        except BaseException:
            self._group, self._batch = -1, None  # do not reuse a broken iterator
            raise
        return self._batch.column(self._name)[row - self._start]

    def _read(self, group: int) -> Iterator[Any]:
        import pyarrow as pa

        try:
            # No threads: this actor's share of the machine is placement.rollout.cpus.
            yield from self._file.iter_batches(
                batch_size=self._rows, row_groups=[group], columns=[self._name], use_threads=False
            )
        except (pa.ArrowException, OSError) as error:
            where = f"column {self._name}, row {self._starts[group]} and those after it"
            raise ConfigError(f"{_KEY}: {self._path}: {where} cannot be read: {one_line(error)}") from None


def _require_prompt(value: Any, where: str, max_chars: int | None) -> str:
    """Return the text of a cell. Raises ConfigError if it is no prompt, or too long."""
    size = _size(value)
    if max_chars is not None and size > 4 * max_chars:  # a character has four bytes at most
        raise ConfigError(f"{where}: the prompt has {size} bytes, data.max_prompt_chars allows {max_chars} characters")
    text = _text(value, where)
    if text is None or not text.strip():
        raise ConfigError(f"{where}: expected a non-empty prompt, got {text!r}")
    if "\0" in text:
        raise ConfigError(f"{where}: holds the character U+0000, where tokenizers may end a text")
    if max_chars is not None and len(text) > max_chars:
        raise ConfigError(f"{where}: the prompt has {len(text)} characters, data.max_prompt_chars allows {max_chars}")
    return text


def _plain(cell: Any) -> Any:
    """Return the value of a cell that may be an entry of a dictionary."""
    import pyarrow as pa

    return cell.value if pa.types.is_dictionary(cell.type) else cell


def _size(value: Any) -> int:
    """Return the number of bytes of a text or of binary data, without copying them; 0 for null."""
    return value.as_buffer().size if value.is_valid else 0


def _text(value: Any, where: str) -> str | None:
    try:
        return cast("str | None", value.as_py())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not valid UTF-8: {error}") from None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))
