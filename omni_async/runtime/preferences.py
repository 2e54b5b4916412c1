"""Reads preference pairs from a parquet file: the prompts at once, the images of one pair when they are asked for.

Columns: `prompt` (text), `chosen` and `rejected` (an encoded PNG, JPEG or WebP image; a struct with `bytes` and perhaps `path`, as Hugging
Face datasets store images; or the path of an image file in the parquet's folder or below it). Other columns are ignored.

Pairs are random access, but parquet is not: a row is reached by decoding its row group from the start, in batches that are dropped again.
Reading on from the last pair costs nothing extra, so files for shuffled training want row groups of a hundred rows rather than a million.
Memory holds one batch and the data pages it was cut from, whatever the size of the file.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.config import ConfigError
from omni_async.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_KEY = "data.preferences"
_COLUMNS = ("prompt", "chosen", "rejected")
_FORMATS = ("PNG", "JPEG", "WEBP")  # named, so that no bytes reach Pillow's rarer decoders
_MAX_PIXELS = 64_000_000
_MAX_IMAGE_BYTES = 2**28  # of an encoded image
_MAX_PAIRS = 10_000_000  # every prompt is held in memory
_BATCH_BYTES = 32 * 2**20
_BUFFER_BYTES = 2**20


class PreferencePairs:
    """The pairs of one parquet file, numbered by row from 0; every `ConfigError` is one line with file, row and column.

    For one thread at a time. Paths in the file are relative to its folder; one that leads out of it, by `..` or by a link, is refused.
    """

    def __init__(self, path: str) -> None:
        """Reads the footer alone. ConfigError if there is no such file, it is no parquet, or a column is missing or of a wrong type."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            if not Path(path).is_file():  # pyarrow would also take a URL, or a folder
                raise ConfigError(f"{_KEY}: no such file: {path}")
            # Without these two, pyarrow reads the columns of a row group whole before it hands out the first batch.
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            schema = self._file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{_KEY}: {path} cannot be read as parquet: {_one_line(error)}") from None
        for column in _COLUMNS:
            self._check_column(schema, column)
        metadata = self._file.metadata
        if metadata.num_rows == 0:
            raise ConfigError(f"{_KEY}: {path} holds no pairs; expected one a row")
        if metadata.num_rows > _MAX_PAIRS:
            raise ConfigError(f"{_KEY}: {path} holds {metadata.num_rows} pairs, at most {_MAX_PAIRS} are read; split it")
        self._num_rows: int = metadata.num_rows
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = list(accumulate(sizes, initial=0))[:-1]
        self._folder = Path(path).resolve().parent
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._batch_start = 0

    def __len__(self) -> int:
        return self._num_rows

    def prompts(self, max_chars: int | None = None) -> list[Prompt]:
        """All prompts in order; `Prompt.index` is the pair's number. Reads one column. ConfigError for a row without a prompt, or with one
        of more than `max_chars` characters."""
        prompts: list[Prompt] = []
        for batch in self._read(batch_size=1024, columns=["prompt"]):
            for value in batch.column(0):
                where = self._where(len(prompts), "prompt")
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{where}: not valid UTF-8: {error}") from None
                if text is None or not text.strip():
                    raise ConfigError(f"{where}: expected a non-empty prompt, got {text!r}")
                if max_chars is not None and len(text) > max_chars:
                    raise ConfigError(f"{where}: the prompt has {len(text)} characters, data.max_prompt_chars allows {max_chars}")
                prompts.append(Prompt(len(prompts), text))
        return prompts

    def images(self, pair: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The chosen and the rejected image of a pair, each (H, W, 3) uint8 RGB in its own size, upright as its EXIF data say; of an animation
        the first frame. ConfigError if one cannot be decoded or has more than 64 million pixels, IndexError if there is no such pair."""
        if not 0 <= pair < len(self):
            raise IndexError(f"pair {pair}: {self.path} has pairs 0..{len(self) - 1}")
        offset = self._seek(pair)
        chosen, rejected = (self._image(self._batch.column(column)[offset], self._where(pair, column)) for column in _COLUMNS[1:])
        return chosen, rejected

    def _seek(self, pair: int) -> int:
        """Makes the current batch the one with this pair; returns the pair's place in it."""
        group = bisect_right(self._starts, pair) - 1
        if group != self._group or pair < self._batch_start:
            about = self._file.metadata.row_group(group)
            size = sum(about.column(i).total_uncompressed_size for i in range(about.num_columns))
            rows = max(1, min(about.num_rows, _BATCH_BYTES * about.num_rows // max(size, 1)))
            # No threads: this actor's share of the machine is placement.rollout.cpus.
            self._batches = self._read(batch_size=rows, row_groups=[group], columns=list(_COLUMNS[1:]), use_threads=False)
            self._group, self._batch, self._batch_start = group, None, self._starts[group]
        try:
            while self._batch is None or pair >= self._batch_start + self._batch.num_rows:
                self._batch_start += self._batch.num_rows if self._batch is not None else 0
                self._batch = next(self._batches, None)
                if self._batch is None:
                    raise ConfigError(f"{_KEY}: {self.path}: row {pair} is missing, though the file's footer counts it")
        except BaseException:
            self._group, self._batch = -1, None  # a broken iterator is not read on
            raise
        return pair - self._batch_start

    def _read(self, **what: Any) -> Iterator[Any]:
        import pyarrow as pa

        try:
            yield from self._file.iter_batches(**what)
        except (pa.ArrowException, OSError) as error:
            groups = what.get("row_groups")
            place = f"row {self._starts[groups[0]]} and those after it" if groups else "column prompt"
            raise ConfigError(f"{_KEY}: {self.path}: {place} cannot be read: {_one_line(error)}") from None

    def _where(self, row: int, column: str) -> str:
        return f"{_KEY}: {self.path}: row {row}, column {column}"

    def _check_column(self, schema: Any, column: str) -> None:
        import pyarrow as pa

        found = schema.names.count(column)
        if found != 1:
            problem = "is missing" if not found else f"occurs {found} times"
            raise ConfigError(
                f"{_KEY}: {self.path}: column {column} {problem}; expected prompt, chosen and rejected, got {', '.join(schema.names)}"
            )
        kind = schema.field(column).type
        flat = kind.value_type if pa.types.is_dictionary(kind) else kind
        if column == "prompt":
            fits, expected = _is_text(flat), "text"
        else:
            stored = flat.field("bytes").type if pa.types.is_struct(flat) and flat.get_field_index("bytes") >= 0 else None
            # A struct whose `bytes` are all null has paths.
            fits = _is_text(flat) or _is_bytes(flat) if stored is None else _is_bytes(stored) or pa.types.is_null(stored)
            expected = "encoded images (binary, or a struct with binary `bytes`) or their paths (text)"
        if not fits:
            raise ConfigError(f"{_KEY}: {self.path}: column {column}: expected {expected}, got {kind}")

    def _image(self, value: Any, where: str) -> NDArray[np.uint8]:
        try:
            content = value.as_py()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: not valid UTF-8: {error}") from None
        if isinstance(content, dict):
            content = content["bytes"] if content["bytes"] is not None else content.get("path")
        if isinstance(content, bytes) and content:
            if len(content) > _MAX_IMAGE_BYTES:
                raise ConfigError(f"{where}: the image has {len(content)} bytes, at most {_MAX_IMAGE_BYTES} are decoded")
            return _decode(io.BytesIO(content), where)
        if isinstance(content, str) and content:
            return _decode(self._file_of(content, where), where)
        raise ConfigError(f"{where}: there is no image")

    def _file_of(self, text: str, where: str) -> Path:
        try:
            file = (self._folder / text).resolve()
            inside = not Path(text).is_absolute() and file.is_relative_to(self._folder)
            exists = inside and file.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, links in a circle
            raise ConfigError(
                f"{where}: {text[:200]!r} is no usable path: {getattr(error, 'strerror', None) or _one_line(error)}"
            ) from None
        if not inside:
            raise ConfigError(
                f"{where}: {text[:200]!r} leads out of the parquet's folder; expected a path relative to it, to a file inside"
            )
        if not exists:
            raise ConfigError(f"{where}: no such file: {text[:200]!r}")
        if file.stat().st_size > _MAX_IMAGE_BYTES:
            raise ConfigError(f"{where}: {text[:200]!r} has {file.stat().st_size} bytes, at most {_MAX_IMAGE_BYTES} are decoded")
        return file


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _decode(source: Path | io.BytesIO, where: str) -> NDArray[np.uint8]:
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(source, formats=_FORMATS) as image:
            width, height = image.size  # of the header: nothing is decoded yet
            if width * height > _MAX_PIXELS:
                raise ConfigError(f"{where}: the image has {width} x {height} pixels, at most {_MAX_PIXELS} are decoded")
            if image.mode[0] in "IF":
                raise ConfigError(f"{where}: the image has mode {image.mode}; expected 8 bits a channel, which more would be cut off to")
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except ConfigError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"{where}: not a PNG, JPEG or WebP image") from None
    except Exception as error:  # noqa: BLE001 (decoders meet foreign bytes with any exception they like; Pillow's bomb guard is one)
        raise ConfigError(f"{where}: the image cannot be decoded: {type(error).__name__}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
