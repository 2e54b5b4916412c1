"""Tests what people bring as prompts: every kind of input works, or is refused in one line with the way out."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omni_async.config import ConfigError
from omni_async.config.tree import overridden
from omni_async.data.image_files import read_prompt_image
from omni_async.data.preferences import PreferencePairs
from omni_async.data.prompts import load_prompts
from omni_async.data.tables import open_table
from omni_async.types import Prompt
from tests.fuzz.foreign import changed
from tests.support.examples import few

ROWS: list[dict[str, Any]] = [
    {"prompt": 'a sign "A"', "target": "A", "n": 1},
    {"prompt": "ein Baum, ä", "target": None, "n": 2},
]
TEXTS = [row["prompt"] for row in ROWS]


def png(level: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def texts(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def arrow(path: Path, table: pa.Table, file: bool = False, **how: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        kind = pa.ipc.new_file if file else pa.ipc.new_stream
        with kind(sink, table.schema, options=pa.ipc.IpcWriteOptions(**how)) as writer:
            writer.write_table(table)


def saved(folder: Path) -> None:
    """Writes what `Dataset.save_to_disk` of Hugging Face datasets does, in two shards."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, row in zip(names, ROWS, strict=True):
        arrow(folder / name, pa.Table.from_pylist([row], pa.Table.from_pylist(ROWS).schema))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def saved_splits(folder: Path) -> None:
    folder.mkdir()
    saved(folder / "train")
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')


def image_folder(metadata: str, content: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "a.png").write_bytes(png())
        (folder / metadata).write_text(content)

    return make


def shards(*splits: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        for split in splits:
            for i, row in enumerate(ROWS):
                table = pa.Table.from_pylist([row])
                pq.write_table(table, folder / "data" / f"{split}-0000{i}-of-00002.parquet")

    return make


def parquet(**how: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, **how)


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'prompt,target,n\n"a sign ""A""",A,1\n"ein Baum, ä",,2\n'
# name: (what is at the path, the prompts' texts)
WORKS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "p.txt": (texts("\n".join(TEXTS)), TEXTS),
    "dos.txt": (texts("\ufeff" + "\r\n".join(TEXTS)), TEXTS),
    "p.jsonl": (texts(JSONL), TEXTS),
    "list.json": (texts(json.dumps(ROWS)), TEXTS),
    "strings.json": (texts(json.dumps(TEXTS)), TEXTS),
    "p.csv": (texts(CSV), TEXTS),
    "excel.csv": (texts("\ufeff" + CSV.replace("\n", "\r\n")), TEXTS),
    "mac.csv": (texts(CSV.replace("\n", "\r")), TEXTS),
    "p.tsv": (texts("prompt\ttarget\nein Baum, ä\t\n"), TEXTS[1:]),
    "p.parquet": (parquet(), TEXTS),
    "zstd.parquet": (parquet(compression="zstd", row_group_size=1), TEXTS),
    "p.arrow": (lambda path: arrow(path, pa.Table.from_pylist(ROWS)), TEXTS),
    "file.arrow": (lambda path: arrow(path, pa.Table.from_pylist(ROWS), file=True), TEXTS),
    "saved": (saved, TEXTS),
    "images": (image_folder("metadata.jsonl", '{"file_name": "a.png", "prompt": "x"}'), ["x"]),
    "images_csv": (image_folder("metadata.csv", "file_name,prompt\na.png,x\n"), ["x"]),
    "captions": (image_folder("a.txt", "two\nlines\n"), ["two lines"]),
    "captions_json": (image_folder("a.json", '{"prompt": "x", "target": "t"}'), ["x"]),
    "shards": (shards("train"), TEXTS),
}
# name: (what is at the path, the part below it, the end of the line)
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "p.xlsx": (texts(b"PK"), ".txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow, got .xlsx"),
    "p.csv.gz": (texts(b"\x1f\x8b"), "got .gz; unpack it"),
    "nowhere": (lambda path: None, "no such file: {path}"),
    "nowhere.csv": (lambda path: None, "no such file: {path}"),
    "empty": (Path.mkdir, "it is a folder, not a file; expected a saved dataset, metadata.jsonl, media with captions"),
    "text.csv": (texts("text,n\na cat,1\n"), "got text, n; name its column, as data.columns.prompt=text"),
    "empty_cell.csv": (texts("n,prompt\n1,a cat\n2,\n"), "{path}:3: the prompt is empty; write its text, or remove"),
    "null.parquet": (
        lambda path: pq.write_table(pa.table({"prompt": ["a cat", None], "n": [1, 2]}), path),
        "{path}: row 1: the prompt is empty; write its text, or remove the row",
    ),
    "number.json": (
        texts('["a cat", 7]'),
        '{path}: row 1: expected a text, or an object such as {{"prompt": "a cat"}}, got 7',
    ),
    "semicolons.csv": (texts("prompt;n\na cat;1\n"), "got prompt;n; the cells of a .csv are separated by commas"),
    "open.csv": (texts('prompt\n"a cat\n'), 'a cell with a quotation mark is quoted: "a ""b"""'),
    "lines.json": (texts(JSONL), "objects without a list around them are .jsonl"),
    "object.json": (texts('{"prompt": ["a"]}'), "or of prompts, got a JSON dict; put the rows into [ ]"),
    "twice.json": (texts('[{"prompt": "a", "prompt": "b"}]'), "key 'prompt' given twice"),
    "no.parquet": (texts(b"PAR1"), "cannot be read as parquet"),
    "no.arrow": (texts(b"ARROW1\0\0" + b"x" * 90), "cannot be read as Arrow"),
    "small.arrow": (
        lambda path: arrow(path, pa.table({"prompt": ["x" * 10_000]}), compression="zstd"),
        "its columns are compressed; write it without compression, or as .parquet",
    ),
    "several": (shards("test", "train"), "holds test, train; name one, as {path}/test"),
    "splits": (saved_splits, "holds several splits; name one, as {path}/train"),
    "alone": (image_folder("notes.md", ""), "a.png: there is no caption; write a.txt"),
    "outside": (image_folder("metadata.jsonl", '{"file_name": "../a.png", "prompt": "x"}'), "leads out of the prompt"),
    "damaged": (image_folder("state.json", '{"_data_files": [{"filename": "../x.arrow"}]}'), "save the dataset again"),
}  # fmt: skip


def load(path: Path, **columns: str | None) -> list[Prompt]:
    return load_prompts(str(path), "data.prompts", 100, columns=columns)


@pytest.mark.parametrize("name", WORKS)
def test_an_input_that_works(tmp_path, name):
    make, expected = WORKS[name]
    make(tmp_path / name)
    prompts = load(tmp_path / name)
    assert [prompt.text for prompt in prompts] == expected
    assert [prompt.index for prompt in prompts] == [*range(len(expected))]
    if name.startswith(("images", "captions")):
        assert read_prompt_image(prompts[0].images[0]).image.shape == (3, 4, 6)
    if expected == TEXTS and not name.endswith((".txt", "strings.json")):
        assert prompts[0].target == "A" and str(prompts[0].metadata["n"]) == "1" and prompts[1].target is None


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_that_is_refused_with_the_way_out(tmp_path, name):
    make, why = REFUSED[name]
    make(tmp_path / name)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / name)
    message = str(refused.value)
    assert "\n" not in message and message.startswith("data.prompts: ")
    assert why.format(path=tmp_path / name) in message


def test_a_split_is_named_below_its_folder(tmp_path):
    shards("test", "train")(tmp_path / "several")
    saved_splits(tmp_path / "splits")
    assert [prompt.text for prompt in load(tmp_path / "several" / "test")] == TEXTS
    assert [prompt.text for prompt in load(tmp_path / "splits" / "train")] == TEXTS
    with pytest.raises(ConfigError, match=r"no such split: 'val'; .*several has test, train"):
        load(tmp_path / "several" / "val")


def test_data_sets_of_a_hubs_cache(tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "datasets--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (repository / "blobs", repository / "refs", snapshot / "data"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    contents = {"train.jsonl": '{"prompt": "x", "image": "a.png"}', "test.jsonl": '{"prompt": "y"}', "a.png": png(9)}
    for name, content in contents.items():
        texts(content)(repository / "blobs" / name)
        (snapshot / "data" / name).symlink_to(f"../../../blobs/{name}")
    tree = {"data": {"prompts": None}}

    def found(given: str) -> list[Prompt]:
        return load(Path(overridden(tree, [f"data.prompts={given}"], Path("recipe"))["data"]["prompts"]))

    [prompt] = found("owner/name/train")
    assert prompt.text == "x" and read_prompt_image(prompt.images[0]).image[0, 0, 0] == 9
    assert [prompt.text for prompt in found("owner/name/test")] == ["y"]
    with pytest.raises(ConfigError, match=r"holds test, train; name one, as .*/test$"):
        found("owner/name")
    with pytest.raises(ConfigError, match=r"no such file: .*/other/set; .* `hf download --repo-type dataset other/se"):
        found("other/set")
    (snapshot / "data" / "train.jsonl").unlink()
    (snapshot / "data" / "train.jsonl").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text('{"prompt": "x"}')
    with pytest.raises(ConfigError, match=r"train\.jsonl leads out of its folder"):
        found("owner/name/train")


def test_columns_have_the_names_that_the_recipe_gives(tmp_path):
    rows = [{"caption": "a", "prompt": "no", "word": "A", "picture": {"bytes": png(7), "path": None}, "raw": b"x"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    [prompt] = load(tmp_path / "p.parquet", prompt="caption", target="word", image="picture")
    assert (prompt.text, prompt.target, prompt.metadata) == ("a", "A", {})
    assert read_prompt_image(prompt.images[0]).image[0, 0, 0] == 7
    [prompt] = load(tmp_path / "p.parquet", prompt="caption")
    assert prompt.metadata == {"word": "A"} and not prompt.images, "binary cells of other columns are not read"
    (tmp_path / "p.csv").write_text("text,image\na,nowhere.png\n")
    assert load(tmp_path / "p.csv", prompt="text", image=None)[0].images == ()
    with pytest.raises(ConfigError, match=r"no row has 'label', which data.columns.target names; it has text, image"):
        load(tmp_path / "p.csv", prompt="text", image=None, target="label")
    (tmp_path / "p.csv").write_text("text;label\na;b\n")
    with pytest.raises(ConfigError, match=r"it has text;label: separate columns by commas in \.csv, by tabs in"):
        load(tmp_path / "p.csv", prompt="text")


def test_an_embedded_image_that_is_none_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["x"], "image": [b"no image"]}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=r"p\.parquet: row 0: image: not a PNG, JPEG or WebP image"):
        load(tmp_path / "p.parquet")


def test_a_wrong_line_is_reported_with_the_one_that_ends_the_file(tmp_path):
    (tmp_path / "p.csv").write_text('prompt,n\n"",1\n"a cat\n')
    with pytest.raises(ConfigError, match=r"p\.csv:2: the prompt is empty; .*; .*p\.csv:3: no CSV: "):
        load(tmp_path / "p.csv")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json", "arrow", "parquet"])
def test_preference_pairs_are_a_table_of_any_format(tmp_path, suffix):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(png(ord(name)))
    path = tmp_path / f"pairs.{suffix}"
    rows = [{"text": "x", "chosen": "a.png", "rejected": "b.png", "n": 1}]
    if suffix == "csv":
        path.write_text("text,chosen,rejected,n\nx,a.png,b.png,1\n")
    elif suffix in ("jsonl", "json"):
        path.write_text(json.dumps(rows if suffix == "json" else rows[0]))
    elif suffix == "arrow":
        arrow(path, pa.Table.from_pylist([row | {"chosen": {"bytes": png(97), "path": "a.png"}} for row in rows]))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    pairs = PreferencePairs(str(path), {"prompt": "text"})
    assert [prompt.text for prompt in pairs.prompts()] == ["x"] and pairs.check_images() is None
    assert [media.image[0, 0, 0] for media in pairs.media(0)] == [97, 98]
    with pytest.raises(ConfigError, match=r"prompt is missing; expected prompt, chosen and rejected, got .*text"):
        PreferencePairs(str(path))


def test_an_arrow_bomb_is_refused_before_it_is_in_memory(tmp_path):
    nulls = pa.ListArray.from_arrays([0, 2**23], pa.nulls(2**23))
    arrow(tmp_path / "p.arrow", pa.table({"prompt": ["x"], "n": nulls}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"row 0 has 8388\d+ bytes"):
        load(tmp_path / "p.arrow")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


@few(60)
@given(data=st.data())
def test_a_damaged_arrow_file_is_read_or_refused(tmp_path, data):
    path = tmp_path / "t.arrow"
    arrow(path, pa.table({"image": ["a.png"] * 3, "n": [[1], [], [2, 3]], "t": [["x"], None, ["y"]]}))
    path.write_bytes(data.draw(changed(path.read_bytes())))
    try:
        assert all(isinstance(fields(), dict) for _, _, fields in open_table(path).rows())
    except ConfigError as error:
        assert "\n" not in str(error)
