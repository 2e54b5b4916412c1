"""Tests that nothing in an image file but its pixels reaches a decoder, and that the pixels stay as they were."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from omni_async.config import ConfigError
from omni_async.data.image_files import encoded_bytes, prompt_image, read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, **how)
    return file.getvalue()


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: bytes) -> bytes:
    """Returns a PNG with these chunks before its pixels."""
    return b"%s%s%s" % ((whole := encoded("PNG"))[:33], b"".join(chunks), whole[33:])


def jpeg(*segments: bytes) -> bytes:
    """Returns a JPEG with these segments at its begin."""
    return b"\xff\xd8" + b"".join(segments) + encoded("JPEG")[2:]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def bomb(entries: int, size: int) -> bytes:
    """Returns EXIF data whose entries all refer to the same `size` bytes."""
    head = b"MM\0\x2a\0\0\0\x08" + struct.pack(">H", entries)
    body = b"".join(struct.pack(">HHII", 0x9000 + i, 7, size, 0) for i in range(entries))
    return (head + body).ljust(2 * size, b"\0")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_images_stand_as_pillow_puts_them(kind):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0110], exif[0x0112] = "a camera", orientation
        content = encoded(kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
        assert np.array_equal(read_image(content, "x").pixels, expected)


@pytest.mark.parametrize(
    "content",
    [
        png(chunk(b"eXIf", bomb(1000, 2**17))),
        jpeg(segment(0xE1, b"Exif\0\0" + bomb(2000, 32000))),
        jpeg(segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"), segment(0xE2, b"MPF\0" + bomb(2000, 32000))),
        png(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))] * 60),
        png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))),
    ],
)
def test_what_surrounds_the_pixels_takes_no_memory(content):
    tracemalloc.start()
    try:
        found = read_image(content, "x").pixels
        assert tracemalloc.get_traced_memory()[1] < 4 * len(content) + 2**20
    finally:
        tracemalloc.stop()
    assert found.shape == PIXELS.shape


def frames(count: int) -> bytes:
    one = b"ANMF" + struct.pack("<I", 16) + bytes(16)
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\2" + bytes(9) + one * count
    return b"RIFF" + struct.pack("<I", len(body)) + body


def scans(count: int) -> bytes:
    whole = encoded("JPEG", progressive=True)
    first = whole.index(b"\xff\xda")
    one = whole[first : whole.index(b"\xff", first + 2)]
    return whole[:first] + one * count + whole[first:]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (png(chunk(b"teXt") * 2**17), "more than 131072 parts"),
        (jpeg(segment(0xFE, b"") * 2**17), "more than 131072 parts"),
        (jpeg(b"\xff" * 2**18), "more than 131072 parts"),
        (frames(2**14), "more than 16384 parts"),
        (scans(70), "more than 64 scans"),
        (encoded("JPEG")[:300], "cannot be decoded"),
        (encoded("PNG")[:-100], "cannot be decoded"),
    ],
)
def test_lists_without_end_and_files_cut_off_are_refused(content, why):
    with pytest.raises(ConfigError, match=f"^x: [^\n]*{why}[^\n]*$"):
        read_image(content, "x")


def test_an_image_that_is_replaced_by_a_pipe_or_leads_elsewhere_is_refused(tmp_path: Path):
    (inside := tmp_path / "inside").mkdir()
    (tmp_path / "x.png").write_bytes(encoded("PNG"))
    (inside / "x.png").symlink_to(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"'x\.png' leads out of its folder; copy"):
        read_image(inside / "x.png", "here", inside)
    found = prompt_image(inside / "x.png", "here")
    (tmp_path / "x.png").unlink()
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(ValueError, match="it is a named pipe"):
        encoded_bytes(found)
    with pytest.raises(ConfigError, match=r"here: x\.png cannot be read: it is a named pipe"):
        read_image(inside / "x.png", "here")
