"""Tests that foreign tables and media folders are read within bounds and within their folder."""

from __future__ import annotations

import gzip
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omni_async.commands.scoring.samples import Sample, find_samples
from omni_async.config import ConfigError
from omni_async.data.media_files import read_media
from omni_async.data.tables import open_table
from omni_async.types import Prompt
from tests.fuzz.foreign import changed
from tests.support.examples import few


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with an image, and another image outside of it; changes into the folder that contains both."""
    (tmp_path / "data" / "below").mkdir(parents=True)
    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    for place in ("data/a.png", "data/below/b.png", "outside.png"):
        image.save(tmp_path / place)
    (tmp_path / "data" / "link.png").symlink_to("../outside.png")
    os.mkfifo(tmp_path / "data" / "pipe.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def write(name: str, content: str | bytes | dict[str, Any] | list[dict[str, Any]]) -> Path:
    table = Path("data", name)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), table)
    else:
        table.write_bytes(content.encode() if isinstance(content, str) else content)
    return table


def found(path: Path) -> list[Sample]:
    return find_samples([path], 100)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        found(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(path))
    return message


ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "target": "A", "image": "a.png", "style": "ink", "metadata": {"n": [1]}},
    {"prompt": "b", "target": None, "image": "below/b.png", "style": None, "metadata": None},
]
CSV = 'prompt,target,image,style,metadata\na,A,a.png,ink,"{""n"": [1]}"\nb,,below/b.png,,\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.jsonl", ROWS), ("t.csv", CSV), ("t.parquet", {key: [row[key] for row in ROWS] for key in ROWS[0]})],
)
def test_a_table_names_media_prompts_targets_and_metadata(name, content, folder):
    one, other = found(write(name, content))
    assert (one.prompt, other.prompt) == (Prompt(0, "a", "A", {"style": "ink", "n": [1]}), Prompt(1, "b"))
    assert [sample.files["image"].resolve() for sample in (one, other)] == [folder / "a.png", folder / "below/b.png"]


TEXTS: list[dict[str, Any]] = [
    {"prompt": "1 + 1", "target": "2", "text": "2", "tokens": 4},
    {"prompt": "1 + 2", "target": "3", "text": "three", "finish": "length"},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-000010.jsonl", TEXTS),
        ("t.csv", "prompt,target,text,finish\n1 + 1,2,2,\n1 + 2,3,three,length\n"),
        ("t.parquet", {key: [row.get(key) for row in TEXTS] for key in ("prompt", "target", "text", "finish")}),
    ],
)
def test_a_table_may_hold_texts_in_place_of_files(name, content):
    samples = found(write(name, content))
    assert samples[0].prompt == Prompt(0, "1 + 1", "2")
    assert {sample.parts for sample in samples} == {("text",)}
    made = [sample.media() for sample in samples]
    assert [(one.parts, one.text, one.finish) for one in made] == [
        (("text",), "2", "stop"),
        (("text",), "three", "length"),
    ]
    assert all(name in sample.name for sample in samples)


def test_a_text_next_to_a_file_is_metadata_and_a_wrong_text_is_refused():
    [one] = found(write("t.jsonl", [{"prompt": "x", "image": "a.png", "text": "seen"}]))
    assert one.parts == ("image",) and one.prompt.metadata == {"text": "seen"}
    for row in ({"text": 4}, {"text": "4", "finish": "cut"}, {"text": "4", "tokens": "9"}, {"text": "4", "tokens": -1}):
        message = refusal(write("t.jsonl", [{"prompt": "x"} | row]))
        assert "t.jsonl:1" in message
    assert "names no media; expected" in refusal(write("t.jsonl", [{"prompt": "x"}]))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["image", "images"])
def test_a_table_names_files_of_its_folder_alone(kind, column, folder):
    def table(name: str) -> Path:
        row: dict[str, Any] = {"prompt": "x", "image": "a.png"} | ({"image": name} if column == "image" else {})
        row |= {"images": [name]} if column == "images" else {}
        if kind == "csv":
            cells = [json.dumps(cell).replace('"', '""') if isinstance(cell, list) else cell for cell in row.values()]
            return write("t.csv", ",".join(row) + "\n" + ",".join(f'"{cell}"' for cell in cells) + "\n")
        return write(f"t.{kind}", [row] if kind == "jsonl" else {key: [cell] for key, cell in row.items()})

    place = {"jsonl": "t.jsonl:1", "csv": "t.csv:2", "parquet": "t.parquet: row 0"}[kind]
    for name in ("a.png", "./below/b.png", "below/../a.png", str(folder / "a.png")):
        assert len(found(table(name))) == 1
    outside = str(folder.parent / "outside.png")
    for name in ("../outside.png", "link.png", outside, "/dev/zero", "below/../../outside.png"):
        message = refusal(table(name))
        assert f"{place}: image: {name!r} leads out of its folder; copy the file into it, or name it" in message
    for name, why in (("pipe.png", "it is a named pipe"), ("below", "it is a folder"), ("x" * 300, "too long")):
        assert place in (message := refusal(table(name))) and why in message


def test_a_link_that_is_put_in_place_later_is_not_followed():
    [sample] = found(write("t.jsonl", [{"prompt": "x", "image": "a.png"}]))
    sample.files["image"].unlink()
    sample.files["image"].symlink_to("../outside.png")
    with pytest.raises(ConfigError, match=r"'a\.png' leads out of its folder"):
        read_media(sample.files, sample.within)


@pytest.mark.parametrize("name", ["a.txt", "a.json", "prompts.txt", "link.png", "train-000001.jsonl"])
def test_files_of_a_media_folder_are_no_links_to_elsewhere(name, folder):
    (folder.parent / "secret").write_text('{"prompt": "secret", "image": "a.png"}\n')
    if name != "link.png":
        (folder / "link.png").unlink()
        (folder / name).symlink_to("../secret")
    with pytest.raises(ConfigError, match=rf"data/{name}.* leads out of its folder|{name} cannot be read: it leads"):
        found(folder)


def test_pipes_folders_and_long_names_in_a_media_folder_do_no_harm(folder):
    (folder / "link.png").unlink()
    for name in ("a.txt", "a.json", "prompts.txt"):
        os.mkfifo(folder / name)
    (folder / "folder.png").mkdir()
    long = (folder / "a.png").rename(folder / ("x" * 251 + ".png"))
    [sample] = found(folder)
    assert (sample.files["image"], sample.prompt.text) == (long, "")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("t.csv", 'prompt,image\nx,a.png\n"x,a.png\n', "t.csv:3: no CSV: unexpected end of data"),
        (
            "t.csv",
            "prompt,image\n" + "x" * 200_000 + ",a.png\n",
            "field larger than field limit (131072); write long texts as .jsonl",
        ),
        ("t.csv", "prompt,image\n" + "x" * 2**20 + ",a.png\n", "t.csv:2: the line has 1048583 characters"),
        ("t.csv", b"prompt,image\nx,a.png\n\0,a.png\n", "t.csv:3: holds the character U+0000"),
        ("t.csv", b"prompt,image\nx,a.png\n\xff,a.png\n", "t.csv:3: not UTF-8 text: byte 0xff"),
        ("t.csv", "image," * 100_000 + "\n" + "a\n" * 9, "t.csv:1: 100001 columns, at most 1000 are read"),
        ("t.csv", "image,image\na.png,a.png\n", "t.csv:1: two columns have the name 'image'"),
        ("t.csv", 'image,metadata\na.png,"{""a"": 1, ""a"": 2}"\n', "t.csv:2: metadata: key 'a' given twice"),
        ("t.csv", 'image,metadata\na.png,"[' + "[" * 5000 + '"\n', "t.csv:2: metadata: not valid JSON: nested"),
        ("t.csv", "", "t.csv: holds no rows"),
        ("t.jsonl", b'{"prompt": "x", "image": "a.png"}\n{"image": "\xff"}\n', "t.jsonl:2: not UTF-8 text: byte 0xff"),
        ("t.jsonl", '{"image": "a.png", "n": 1e999}', "t.jsonl:1: not valid JSON: Number out of range"),
        ("t.jsonl", '{"image": "a.png", "image": "b.png"}', "t.jsonl:1: key 'image' given twice"),
        ("t.jsonl", '{"image": "a.png", "n": ' + "[" * 5000 + "]" * 5000 + "}", "t.jsonl:1: not valid JSON: nested"),
        ("t.jsonl", '{"image": "a.png", "n": "' + "x" * 2**20 + '"}', "t.jsonl:1: the line has 1048603 characters"),
        ("t.jsonl", '{"image": "a.png", "prompt": "\\u0000"}', "t.jsonl:1: holds the character U+0000"),
        ("t.jsonl", '{"image": "a\\u0000.png"}', "t.jsonl:1: image: expected a path"),
        ("t.jsonl", gzip.compress(b'{"image": "a.png"}', mtime=0), "t.jsonl:1: not UTF-8 text"),
    ],
)
def test_damaged_and_endless_texts_are_one_line_with_the_number(name, content, why):
    assert why in refusal(write(name, content))


def test_tables_of_text_may_have_marks_and_any_ends_of_lines():
    table = write("t.csv", b'\xef\xbb\xbfprompt,image\r\n"two\nlines",a.png\r\n\r\nlast,a.png')
    assert [sample.prompt.text for sample in found(table)] == ["two\nlines", "last"]
    table = write("t.csv", b"prompt,image\rone,a.png\rtwo,a.png\r")
    assert [sample.prompt.text for sample in found(table)] == ["one", "two"]
    [sample] = found(write("t.csv", "image,prompt,,\na.png,a cat,,\n"))
    assert (sample.prompt.text, sample.prompt.metadata) == ("a cat", {})
    [sample] = found(write("t.jsonl", '{"prompt": "x", "image": "a.png", "n": ' + "9" * 400 + "}"))
    assert str(sample.prompt.metadata["n"]) == "9" * 400


@pytest.mark.parametrize(
    ("kind", "name", "most", "why"),
    [
        ("t.parquet", "_MOST_ROWS", 2, "; split it"),
        ("t.parquet", "_LARGEST_FILE", 60, "; split it"),
        ("t.parquet", "_MOST_VALUES", 4, "; split it"),
        ("t.jsonl", "_LARGEST_FILE", 60, "is larger than 60 bytes"),
        ("t.jsonl", "_MOST_VALUES", 4, "; split it"),
    ],
)
def test_all_rows_together_have_bounds(kind, name, most, why, monkeypatch):
    monkeypatch.setattr(f"omni_async.data.tables.{name}", most)
    table = [{"prompt": "x", "image": "a.png", "n": 1}] * 3
    message = refusal(write(kind, table if kind == "t.jsonl" else {key: [cell] * 3 for key, cell in table[0].items()}))
    assert why in message


def repeated(value: str, times: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


def nested(depth: int) -> pa.Array:
    array = pa.array([1])
    for _ in range(depth):
        array = pa.StructArray.from_arrays([array], ["a"])
    return array


def lists(count: int, value: str) -> pa.Array:
    return pa.ListArray.from_arrays([0, count], repeated(value, count).cast(pa.string()))


def lists_of_one(array: pa.Array, depth: int) -> pa.Array:
    """Makes a row: the array in a list, its values in so many lists of one."""
    count = len(array)
    for _ in range(depth):
        array = pa.ListArray.from_arrays(pa.array(np.arange(len(array) + 1), pa.int32()), array)
    return pa.ListArray.from_arrays([0, count], array)


DELTA = {"n.list.element": "DELTA_BYTE_ARRAY", "image": "PLAIN", "prompt": "PLAIN"}


@pytest.mark.parametrize(
    ("column", "how", "why"),
    [
        (repeated("x" * 5_000_000, 1000), {}, "row 0: the row has 5000"),
        (lists(2000, "y" * 20_000), {}, "row 0 has 4000"),
        (lists(200, "y" * 2000), {"use_dictionary": False, "column_encoding": DELTA}, "texts in lists are in delta"),
        (pa.ListArray.from_arrays([0, 2**21], pa.nulls(2**21, pa.int8())), {}, "lists of 2097152 values, at most 1000"),
        (pa.nulls(1_000_001, pa.int8()), {}, "1000001 rows, at most 1000000 are read"),
        (pa.array(["z" * 67_200_000]), {"compression": "zstd", "use_dictionary": False}, "encodes 6720"),
        (pa.array([None], pa.binary(2**17)), {}, "values of 131072 bytes, at most 65536"),
        (lists_of_one(pa.nulls(2000, pa.binary(2**16)), 0), {}, "values of 65536 bytes, at most 64"),
        (lists_of_one(pa.nulls(2**19, pa.int8()), 9), {}, "lists of 5242880 values, at most 1000"),
        (pa.array([[1] * 9], pa.list_(pa.int8(), 9)), {}, "expected a list of any length"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), {}, "expected plain values, got map"),
        (nested(51), {}, "nested more than 50 levels deep"),
        (nested(120), {}, "columns nest more than 50 levels deep"),
    ],
)
def test_a_parquet_bomb_is_refused_before_it_is_in_memory(column, how, why, monkeypatch):
    monkeypatch.setattr("omni_async.data.tables._MOST_VALUES", 1_000_000)
    column = column if isinstance(column, pa.Array) else pa.array(column)
    path, names = Path("data/t.parquet"), pa.array(["a.png"] * len(column))
    pq.write_table(pa.table({"prompt": names, "image": names, "n": column}), path, **how)
    del column
    assert path.stat().st_size < 2**21
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert why in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_columns_have_a_bound_and_empty_cells_and_groups_are_left_out():
    assert "1001 columns, at most 1000 are read" in refusal(write("t.parquet", {f"c{i}": [1] for i in range(1001)}))
    cells = [{"n": [1, None], "t": ["x"]}, {"n": [], "t": None}]
    table = {"prompt": ["x"] * 3, "image": ["a.png"] * 3, "metadata": [*cells, None]}
    pq.write_table(pa.table(table), "data/t.parquet", row_group_size=1)
    assert [sample.prompt.metadata for sample in found(Path("data/t.parquet"))] == [*cells, {}]


@few(60)
@given(data=st.data())
def test_a_damaged_parquet_table_is_read_or_refused(tmp_path, data):
    table = pa.table({"image": ["a.png"] * 3, "n": [[1], [], [2, 3]], "t": [["x"], None, ["y"]]})
    pq.write_table(table, tmp_path / "t.parquet")
    content = data.draw(changed((tmp_path / "t.parquet").read_bytes()))
    (tmp_path / "t.parquet").write_bytes(content)
    try:
        assert all(isinstance(fields(), dict) for _, _, fields in open_table(tmp_path / "t.parquet").rows())
    except ConfigError as error:
        assert "\n" not in str(error)
