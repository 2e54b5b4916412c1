"""Tests the preference file: every pair as it was stored, in any order, and one line for whatever is wrong with it."""

import io
import os
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from omni_async.config import ConfigError
from omni_async.data.preferences import PreferencePairs
from omni_async.types import Prompt
from tests.data.test_image_bytes import chunk


def pixels_of(pairs: PreferencePairs, pair: int) -> tuple[np.ndarray, np.ndarray]:
    chosen, rejected = pairs.media(pair)
    return chosen.pixels, rejected.pixels


def random_image(seed: int, height: int = 6, width: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **how)
    return file.getvalue()


def write(folder: Path, columns: dict[str, Any], **how: Any) -> str:
    path = folder / "pairs.parquet"
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **how)
    return str(path)


def one_pair(folder: Path, chosen: Any) -> PreferencePairs:
    """Writes a file of one pair, whose other image is a good one of the same type."""
    rejected: Any = encoded(random_image(0))
    if isinstance(chosen, str):
        (folder / "good.png").write_bytes(rejected)
        rejected = "good.png"
    elif isinstance(chosen, dict):
        rejected = {"bytes": rejected, "path": None}
    return PreferencePairs(write(folder, {"prompt": ["a cat"], "chosen": [chosen], "rejected": [rejected]}))


def refusal(folder: Path, chosen: Any) -> str:
    pairs = one_pair(folder, chosen)
    with pytest.raises(ConfigError) as caught:
        pairs.media(0)
    message = str(caught.value)
    assert message.startswith(f"data.preferences: {pairs.path}: row 0, column chosen: ") and "\n" not in message
    return message


def of_header(width: int, height: int) -> bytes:
    """Makes a PNG that promises so many pixels and holds none."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("rows_per_group", [1, 3, 100])
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_every_pair_comes_back_in_any_order(tmp_path, rows_per_group, as_dictionary, monkeypatch):
    monkeypatch.setattr("omni_async.data.preferences._DICTIONARY_ROWS", 4)
    chosen, rejected = [random_image(i) for i in range(10)], [random_image(100 + i, 4, 4) for i in range(10)]
    columns: dict[str, Any] = {"prompt": [f"prompt {i}" for i in range(10)]}
    columns |= {"chosen": [*map(encoded, chosen)], "rejected": [*map(encoded, rejected)]}
    if as_dictionary:
        columns |= {name: pa.array(columns[name]).dictionary_encode() for name in ("prompt", "chosen")}
    pairs = PreferencePairs(write(tmp_path, columns, row_group_size=rows_per_group))
    assert len(pairs) == 10
    assert pairs.prompts() == [Prompt(i, f"prompt {i}") for i in range(10)]
    for i in [*range(10), 9, 9, 0, 7, 2, 3, 8, 1]:
        first, second = pixels_of(pairs, i)
        assert first.dtype == second.dtype == np.uint8
        assert np.array_equal(first, chosen[i]) and np.array_equal(second, rejected[i])


def test_images_may_be_structs_paths_or_other_types_of_bytes(tmp_path):
    image = encoded(random_image(1))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one.png").write_bytes(image)
    structs = {"bytes": image, "path": "elsewhere.png"}, {"bytes": None, "path": "below/one.png"}
    for cell in (image, *structs, "below/one.png", "./below/../below/one.png"):
        assert np.array_equal(pixels_of(one_pair(tmp_path, cell), 0)[0], random_image(1))
    (tmp_path / "linked").symlink_to(tmp_path)  # the folder may itself be a link
    linked = PreferencePairs(str(tmp_path / "linked" / "pairs.parquet"))
    assert np.array_equal(pixels_of(linked, 0)[0], random_image(1))
    for kind in (pa.large_binary(), pa.binary_view(), pa.struct([("bytes", pa.large_binary())])):
        images = pa.array([{"bytes": image} if pa.types.is_struct(kind) else image], kind)
        table = {"prompt": pa.array(["x"]).dictionary_encode(), "chosen": images, "rejected": images, "extra": [1.0]}
        pairs = PreferencePairs(write(tmp_path, table))
        assert pairs.prompts() == [Prompt(0, "x")]
        assert np.array_equal(pixels_of(pairs, 0)[1], random_image(1))


EMPTY = ((b"", None), (None, None), (None, ""))
WHITE = Image.new("RGB", (5, 4), "white")
FLAT = np.full((16, 24, 3), (200, 40, 90), np.uint8)
FRAMES = [Image.fromarray(random_image(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encoded(FLAT, "JPEG", quality=95), FLAT),
        (encoded(FLAT, "WEBP", quality=95), FLAT),
        (encoded(FRAMES[0], save_all=True, append_images=FRAMES[1:]), random_image(0)),  # an animation's first frame
        *((encoded(WHITE.convert(mode)), np.full((4, 5, 3), 255)) for mode in ("L", "LA", "RGBA", "P", "1")),
    ],
)
def test_images_of_every_kind_and_mode_are_rgb(tmp_path, content, expected):
    found, _ = pixels_of(one_pair(tmp_path, content), 0)
    assert found.shape == expected.shape
    lossy = content[:2] == b"\xff\xd8" or content[:4] == b"RIFF"
    assert np.abs(found.astype(int) - expected).max() <= 8 * lossy


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("image", "why"),
    [
        (b"no image", "not a PNG, JPEG or WebP image"),
        (encoded(FLAT, "GIF"), "not a PNG, JPEG or WebP image"),
        (encoded(random_image(0, 64, 64))[:-200], "cannot be decoded"),
        *((image, "there is no image") for image in (b"", *({"bytes": b, "path": p} for b, p in EMPTY))),
        (encoded(Image.new("I;16", (4, 4), 40_000)), "mode I;16; expected 8 bits a channel"),
        (of_header(8000, 8000), "cannot be decoded"),  # not for its size: it has no pixels
        (of_header(8001, 8000), "8001 x 8000 pixels, at most 64000000 are decoded"),
        (of_header(2**31 - 1, 2**31 - 1), "DecompressionBombError"),
        (b"x" * 100_001, "the image has 100001 bytes, at most 100000 are decoded"),
        ("x" * 65537, "the path has 65537 bytes, at most 65536 are taken"),
    ],
)
def test_what_is_no_image_is_refused_with_its_row_and_column(tmp_path, image, why, monkeypatch):
    monkeypatch.setattr("omni_async.data.preferences.MAX_IMAGE_BYTES", 100_000)
    assert why in refusal(tmp_path, image)


OUTSIDE = ("../outside.png", "below/../../outside.png", "link.png", "{outside}", "{inside}")


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (OUTSIDE, "leads out of the table's folder"),
        (("nowhere.png", "below"), "no such file"),
        (("\0", "x" * 5000, "circle.png"), "no usable path"),
    ],
)
def test_a_path_must_stay_in_the_folder_and_name_a_file(tmp_path, paths, why):
    folder = tmp_path / "data"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(encoded(random_image(0)))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    for path in paths:
        named = path.format(outside=tmp_path / "outside.png", inside=folder / "good.png")
        assert why in refusal(folder, named) or (path == "circle.png" and "no such file" in refusal(folder, named))


IMAGES = [encoded(random_image(0))]


def columns(**changed: Any) -> dict[str, Any]:
    return {"prompt": ["x"], "chosen": IMAGES, "rejected": IMAGES} | changed


TWICE = ["prompt", "chosen", "rejected", "chosen"]
NO_IMAGES = "expected encoded images .*, got "


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"prompt": ["x"], "chosen": IMAGES}, "rejected is missing; expected prompt, chosen and rejected, got prompt"),
        (columns(prompt=[1]), "prompt: expected text, got int64"),
        (columns(chosen=[1.5]), f"chosen: {NO_IMAGES}double"),
        (columns(rejected=[[1, 2]]), f"rejected: {NO_IMAGES}list"),
        (columns(rejected=[{"path": "x.png"}]), f"rejected: {NO_IMAGES}struct"),
        (columns(rejected=[{"bytes": b"x", "n": [1]}]), f"rejected: {NO_IMAGES}struct"),
        (columns(chosen=[{"bytes": "text"}]), f"chosen: {NO_IMAGES}struct"),
        (pa.Table.from_arrays([pa.array(["x"]), *[pa.array(IMAGES)] * 3], TWICE), "chosen occurs 2 times"),
        (pa.table(columns()).slice(0, 0), "holds no pairs; expected one a row"),
    ],
)
def test_a_file_with_other_columns_is_refused(tmp_path, columns, why):
    with pytest.raises(ConfigError, match=rf"^data\.preferences: .*pairs\.parquet:? (column )?{why}"):
        PreferencePairs(write(tmp_path, columns))


NO_PARQUET = (b"", b"PAR1", b"prompt,chosen\n", b"PAR1" + b"\xff" * 60 + b"PAR1")


def test_a_file_that_is_not_there_or_no_parquet_is_refused(tmp_path):
    for n, content in enumerate(NO_PARQUET):
        (tmp_path / f"{n}.parquet").write_bytes(content)
    for name, why in (
        (f"{tmp_path}/nowhere.parquet", "no such file: "),
        (str(tmp_path), ".*: holds 0, 1, .*; name one, as "),
        (f"{tmp_path}/\0", ".* cannot be read: embedded null byte$"),
        ("https://localhost:1/pairs.parquet", "no such file: "),
        *((f"{tmp_path}/{n}.parquet", r".* cannot be read as parquet: [^\n]+$") for n in range(len(NO_PARQUET))),
    ):
        with pytest.raises(ConfigError, match=rf"^data\.preferences: {why}"):
            PreferencePairs(name)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (None, "expected a non-empty prompt, got None"),
        (" \n", "expected a non-empty prompt"),
        ("x" * 51, "the prompt has 51 characters"),
        ("y" * 23, "the prompts up to here have more than 25 bytes; split the file"),
        (b"caf\xe9", "not valid UTF-8"),
    ],
)
def test_a_row_without_a_usable_prompt_is_refused(tmp_path, prompt, why, monkeypatch):
    if "split" in why:
        monkeypatch.setattr("omni_async.data.preferences._MAX_PROMPT_BYTES", 25)
    texts = pa.array([b"fine", prompt.encode() if isinstance(prompt, str) else prompt], pa.binary()).view(pa.string())
    pairs = PreferencePairs(write(tmp_path, {"prompt": texts, "chosen": IMAGES * 2, "rejected": texts}))
    with pytest.raises(ConfigError, match=rf"row 1, column prompt: {why}"):
        pairs.prompts(max_chars=50)
    if "UTF-8" in why:
        with pytest.raises(ConfigError, match="row 1, column rejected: not valid UTF-8"):
            pixels_of(pairs, 1)


def test_a_damaged_row_group_does_not_take_the_others_along(tmp_path):
    images = [encoded(random_image(i)) for i in range(6)]
    table = {"prompt": list("abcdef"), "chosen": images, "rejected": images}
    path = write(tmp_path, table, row_group_size=2, use_dictionary=False)
    damaged = pq.ParquetFile(path).metadata.row_group(1).column(1)
    with Path(path).open("r+b") as file:
        file.seek(damaged.data_page_offset)
        file.write(b"\xff" * damaged.total_compressed_size)
    pairs = PreferencePairs(path)
    assert len(pairs.prompts()) == 6
    for _ in range(2):
        for row in (2, 3):
            with pytest.raises(ConfigError, match=r"row 2 and those after it cannot be read: [^\n]+$"):
                pixels_of(pairs, row)
        for row in (0, 1, 4, 5):
            assert np.array_equal(pixels_of(pairs, row)[0], random_image(row))


# Its peak can be asked for. Never freed: what was read through it frees its memory there when it is collected, be that
# long after the test.
COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())


@contextmanager
def counted():
    before = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        yield
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("how", [{"row_group_size": 4}, {"write_batch_size": 1, "data_page_size": 1}])
def test_memory_holds_a_small_part_of_a_large_file(tmp_path, how, monkeypatch):
    """Covers many row groups, and one of many pages."""
    monkeypatch.setattr("omni_async.data.preferences._BUFFER_BYTES", 2**16)
    image = encoded(random_image(0))
    padded = [image + os.urandom(2**17) for _ in range(128)]  # 32 MiB with both columns
    columns = {"prompt": ["x"] * 128, "chosen": padded, "rejected": padded[::-1]}
    path = write(tmp_path, columns, use_dictionary=False, compression="none", **how)
    del padded, columns
    before = pa.total_allocated_bytes()
    pairs = PreferencePairs(path)
    pairs.prompts()
    for row in (0, 1, 90, 127, 5):
        assert np.array_equal(pixels_of(pairs, row)[0], random_image(0))
        assert pa.total_allocated_bytes() - before < 4 * 2**20


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_value_that_a_small_file_repeats_often_is_in_memory_once(tmp_path, as_dictionary):
    """Reads 64 MiB of each column, were it written out."""
    image, prompt = encoded(random_image(0)) + os.urandom(2**18), "x" * 2**18
    columns = {"prompt": [prompt], "chosen": [image], "rejected": [image]}
    indices = pa.array([0] * 256, pa.int32())
    table = {name: pa.DictionaryArray.from_arrays(indices, pa.array(values)) for name, values in columns.items()}
    if not as_dictionary:  # as other writers put it: parquet's dictionaries alone
        kinds = pa.schema([("prompt", pa.string()), ("chosen", pa.binary()), ("rejected", pa.binary())])
        with pq.ParquetWriter(tmp_path / "pairs.parquet", kinds, dictionary_pagesize_limit=2**20) as writer:
            writer.write_table(pa.table(table).cast(kinds))
    else:
        write(tmp_path, table)
    assert (tmp_path / "pairs.parquet").stat().st_size < 2**21
    with counted():
        pairs = PreferencePairs(str(tmp_path / "pairs.parquet"))
        assert np.array_equal(pixels_of(pairs, 200)[1], random_image(0))
        with pytest.raises(ConfigError, match=r"row 0, .* has 262144 bytes, .*max_prompt_chars allows 1000 char"):
            pairs.prompts(max_chars=1000)
        assert 2**19 < COUNTED.max_memory() < 16 * 2**20


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_missing_prompt_or_image_is_refused_and_a_pair_that_is_not_there_is_an_index_error(tmp_path, as_dictionary):
    columns = {"prompt": [None, "x"], "chosen": [IMAGES[0], None], "rejected": IMAGES * 2}
    if as_dictionary:
        columns = {name: pa.array(values).dictionary_encode() for name, values in columns.items()}
    pairs = PreferencePairs(write(tmp_path, columns))
    with pytest.raises(ConfigError, match="row 0, column prompt: expected a non-empty prompt, got None"):
        pairs.prompts()
    pixels_of(pairs, 0)
    with pytest.raises(ConfigError, match="row 1, column chosen: there is no image"):
        pixels_of(pairs, 1)
    pixels_of(pairs, 0)
    for number in (-1, 2):
        with pytest.raises(IndexError, match=rf"pair {number}: .* has pairs 0\.\.1"):
            pixels_of(pairs, number)
