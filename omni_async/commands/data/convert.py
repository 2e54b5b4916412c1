"""Converts the prompts of public benchmarks to tables that a run reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omni_async.config import ConfigError
from omni_async.data.tables import NO_COLUMNS, Columns, Row, open_table

_QUOTED = re.compile(r'["“]([^"”]+)["”]')
# The last parts of the names of T2I-CompBench's files, which are no part of the category.
_PARTS = ("train", "val", "seen", "unseen")
_PAIR = ("caption", "jpg_0", "jpg_1", "label_0")


class Converted(NamedTuple):
    """A table to write: the function that writes it, a summary, and notes on rows that were left out."""

    write: Callable[[Path], object]
    summary: str
    notes: list[str]


def converted(form: str, file: str, suffix: str) -> Converted:
    """Convert a benchmark's file.

    Args:
        form: `geneval`, `ocr`, `pickscore` or `t2i_compbench`.
        file: its path.
        suffix: of the result: `.jsonl`, or `.parquet` for the pairs of Pick-a-Pic.

    Raises:
        ConfigError: a row that the format does not have, or another suffix."""
    if suffix == ".parquet" and form == "pickscore":
        return _pairs(file)
    if suffix != ".jsonl":
        also = " or .parquet" if form == "pickscore" else ""
        raise ConfigError(f"--out: expected a file that ends in .jsonl{also}, got {suffix or 'no suffix'}")
    rows, seen, repeated = [], set(), 0
    for found in _FORMATS[form](file):
        repeated += (text := found["prompt"]) in seen
        if text not in seen or form != "pickscore":
            rows.append(found)
        seen.add(text)
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    notes = [f"left out {repeated} repeated prompts"] if repeated and form == "pickscore" else []
    return Converted(lambda path: path.write_bytes(content), f"{len(rows)} prompts", notes)


def _rows(file: str, columns: Columns = NO_COLUMNS) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, _, fields in open_table(file).rows(columns):
        row = fields()
        if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise ConfigError(f"{where}: expected a prompt, got {', '.join(row)[:200]}")
        yield where, row


def _ocr(file: str) -> Iterator[dict[str, Any]]:
    """Yield prompts with the text in quotes as `target`, as flow_grpo's reward reads it."""
    for where, row in _rows(file):
        if (found := _QUOTED.search(row["prompt"])) is None:
            raise ConfigError(f"{where}: expected a text in double quotes, which the image should show")
        yield {**row, "target": found[1]}


def _geneval(file: str) -> Iterator[dict[str, Any]]:
    """Yield GenEval's metadata as they are, checked for what the scorer `object_checks` reads."""
    for where, row in _rows(file):
        include = row.get("include")
        if not isinstance(include, list) or not all(isinstance(one, dict) and "class" in one for one in include):
            raise ConfigError(f"{where}: include: expected GenEval's objects with a class, got {include!r:.200}")
        yield row


def _t2i_compbench(file: str) -> Iterator[dict[str, Any]]:
    """Yield prompts with the category from the file's name, such as `3d_spatial` of `3d_spatial_train.txt`."""
    words = Path(file).stem.split("_")
    category = "_".join(word for number, word in enumerate(words) if number == 0 or word not in _PARTS)
    for _, row in _rows(file):
        yield {**row, "category": category}


def _pickscore(file: str) -> Iterator[dict[str, Any]]:
    """Yield the prompts of flow_grpo's text file, or the captions of Pick-a-Pic."""
    columns: Columns = {"prompt": "caption"} if Path(file).suffix.lower() == ".parquet" else NO_COLUMNS
    for _, row in _rows(file, columns):
        yield {"prompt": row["prompt"]}


def _pairs(file: str) -> Converted:
    """Convert Pick-a-Pic's pairs: the image with the label 1 is chosen; ties are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs: dict[str, list[Any]] = {"prompt": [], "chosen": [], "rejected": []}
    ties = 0
    for row in open_table(file).rows(binary=("jpg_0", "jpg_1")):
        fields = _pair(row)
        if fields["label_0"] == 0.5:
            ties += 1
            continue
        images = [fields["jpg_0"], fields["jpg_1"]]
        chosen, rejected = images if fields["label_0"] == 1 else reversed(images)
        for column, cell in zip(pairs.values(), (fields["caption"], chosen, rejected), strict=True):
            column.append(cell)
    if not pairs["prompt"]:
        raise ConfigError(f"{file}: holds no pair with a winner")
    table = pa.table(pairs)
    notes = [f"left out {ties} ties"] if ties else []
    # A preference reader decodes a row group from its start.
    return Converted(lambda path: pq.write_table(table, path, row_group_size=100), f"{len(table)} pairs", notes)


def _pair(row: Row) -> dict[str, Any]:
    fields = row.fields()
    if missing := [name for name in _PAIR if name not in fields]:
        raise ConfigError(f"{row.where}: {missing[0]} is missing; expected Pick-a-Pic's {', '.join(_PAIR)}")
    if fields["label_0"] not in (0, 0.5, 1) or not all(isinstance(fields[name], bytes) for name in _PAIR[1:3]):
        raise ConfigError(
            f"{row.where}: expected encoded images and a label 0, 0.5 or 1, got {fields['label_0']!r:.80}"
        )
    return fields


_FORMATS: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "geneval": _geneval,
    "ocr": _ocr,
    "pickscore": _pickscore,
    "t2i_compbench": _t2i_compbench,
}
