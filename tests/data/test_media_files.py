"""Tests that videos and sound from elsewhere are decoded whole, within bounds, and by our own handle alone."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from omni_async.config import ConfigError
from omni_async.data.media_files import read_media
from omni_async.media import Media
from omni_async.records.write.images import write_media

SOUND = np.sin(np.arange(24_000, dtype=np.float32) / 9)[None] * np.float32(0.3)
FILM = Media(
    video=np.random.default_rng(0).integers(0, 256, (24, 3, 32, 32), np.uint8), fps=8, audio=SOUND, sample_rate=8000
)


def remuxed(source: Path, suffix: str, **options: str) -> Path:
    target = source.with_suffix(suffix)
    with av.open(str(source)) as reading, av.open(str(target), "w", options=options) as writing:
        streams = {one.index: writing.add_stream_from_template(one) for one in reading.streams}
        for packet in reading.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                writing.mux(packet)
    return target


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("media")
    mp4, wav = write_media(FILM, folder / "film")
    made = {"mp4": mp4, "wav": wav, "mkv": remuxed(mp4, ".mkv"), "mov": remuxed(mp4, ".mov", movflags="faststart")}
    made["webm"] = remuxed(mp4, ".mkv").rename(folder / "named.webm")
    made["mkv"] = remuxed(mp4, ".mkv")
    for suffix in ("flac", "ogg", "mp3"):
        soundfile.write(made.setdefault(suffix, folder / f"sound.{suffix}"), SOUND[0], 8000)
    return made


def part(file: Path) -> str:
    return "audio" if file.suffix in (".wav", ".flac", ".ogg", ".mp3") else "video"


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_media({part(file): file})
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and "\n" not in message and "\x1b" not in message
    return message


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "webm", "wav", "flac", "ogg", "mp3"])
def test_whole_files_have_all_frames_and_samples(films, kind):
    found = read_media({part(films[kind]): films[kind]})
    if part(films[kind]) == "video":
        assert found.video.shape == FILM.video.shape and found.fps == 8
        assert np.abs(found.video.astype(int).mean() - FILM.video.mean()) < 3
    assert found.audio.shape[0] == 1 and found.audio.shape[1] >= 24_000 and found.sample_rate == 8000
    assert np.abs(found.audio).max() == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "mov", "wav", "flac"])
def test_a_file_that_was_cut_off_is_refused(films, kind, tmp_path):
    content = films[kind].read_bytes()
    for share in (0.2, 0.6, 0.95):
        (cut := tmp_path / f"cut.{kind}").write_bytes(content[: int(share * len(content))])
        assert "cut off: it has" in refusal(cut) or kind == "flac"


def changed(films: dict[str, Path], kind: str, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(films[kind].read_bytes())
    change(content)
    file = films[kind].with_name(f"changed.{kind}")
    file.write_bytes(content)
    return file


def put(content: bytearray, mark: bytes, offset: int, *numbers: int, form: str = ">I") -> None:
    at = content.index(mark) + len(mark) + offset
    for number in numbers:
        struct.pack_into(form, content, at, number)
        at += struct.calcsize(form)


def fragment(content: bytearray) -> None:
    """Appends a fragment whose 500 million samples have no bytes."""
    run = b"trun" + struct.pack(">II", 0, 500_000_000)
    for name in (b"", b"traf", b"moof"):
        run = name + run
        run = struct.pack(">I", len(run) + 4) + run
    content += run


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: put(c, b"stsz", 4, 1, 500_000_000), "its index lists 5000"),
        (lambda c: put(c, b"stts", 4, 1, 2_000_000_000), "its index lists 20000"),
        (fragment, "its index lists 5000"),
        (lambda c: put(c, b"moov", 4, int.from_bytes(b"cmov")), "its index is compressed"),
        (lambda c: put(c, b"ftyp", -8, 3), "a box of the file is damaged"),
        (lambda c: c.extend(b"\0\0\0\x08free" * 2**14), "more than 16384 boxes"),
    ],
)
def test_an_index_of_a_billion_frames_takes_no_memory(films, change, why):
    file = changed(films, "mov", change)
    tracemalloc.start()
    try:
        assert why in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def header(rate: int, channels: int, size: int, content: bytes) -> bytes:
    form = struct.pack("<HHIIHH", 3, channels, rate, rate * 4 * channels & 0xFFFFFFFF, 4 * channels, 32)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header(8000, 1, 0x7FFEFFFF, bytes(64)), "cut off: it has 108 bytes, its header declares 2147418155"),
        (header(8000, 33, 33 * 8, bytes(33 * 8)), "33 channels, expected 1 to 32"),
        (header(1, 1, 64, bytes(64)), "1 samples a second, expected 1000 to 768000"),
        (header(2_000_000_000, 1, 64, bytes(64)), "2000000000 samples a second"),
        (header(8000, 1, 8, struct.pack("<ff", 0, float("nan"))), "not finite, or beyond 1000 times full scale"),
        (header(8000, 1, 8, struct.pack("<ff", 0, 1e30)), "not finite, or beyond 1000 times full scale"),
        (header(8000, 1, 0, b""), "no samples"),
        (b"RIFF\x08\0\0\0WAVE" + b"junk\0\0\0\0" * 2**14, "more than 16384 chunks"),
    ],
)
def test_a_header_that_no_sound_has_is_refused(content, why, tmp_path):
    (tmp_path / "a.wav").write_bytes(content)
    assert why in refusal(tmp_path / "a.wav")


def test_sound_that_was_written_into_a_pipe_is_read_to_its_end(tmp_path):
    for declared in (0x7FFFF000, 0xFFFFFFFF):
        (tmp_path / "a.wav").write_bytes(header(8000, 1, declared, bytes(64)))
        assert read_media({"audio": tmp_path / "a.wav"}).audio.shape == (1, 16)


@pytest.mark.parametrize(
    ("name", "bound", "kinds"),
    [
        ("_MOST_BYTES", 5 * 3 * 32 * 32, ("mp4", "wav")),
        ("_LONGEST_S", 1, ("mp4", "wav")),
        ("_MOST_FRAMES", 5, ("mp4",)),
        ("_MOST_PACKETS", 5, ("mp4",)),
        ("_MOST_PIXELS", 99, ("mp4",)),
    ],
)
def test_videos_and_sound_are_decoded_up_to_a_bound(films, name, bound, kinds, monkeypatch):
    monkeypatch.setattr(f"omni_async.data.media_files.{name}", bound)
    for kind in kinds:
        assert ("at most 99" if bound == 99 else "cut it into parts") in refusal(films[kind])


PLAYLISTS: list[Any] = [
    "ffconcat version 1.0\nfile '{}'\n",
    "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\nfile://{}\n#EXT-X-ENDLIST\n",
    "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><Period><BaseURL>{}</BaseURL></Period></MPD>",
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n{}",
]


@pytest.mark.parametrize("text", PLAYLISTS)
def test_a_file_that_names_others_opens_none(films, text, tmp_path):
    for suffix in (".mp4", ".mkv", ".avi"):
        (tmp_path / f"list{suffix}").write_text(text.format(films["mp4"]))
        assert "cannot be decoded" in refusal(tmp_path / f"list{suffix}")


def test_a_name_is_a_path_and_no_address(films):
    for name in ("concat:film.mp4|film.mp4", "file:film.mp4", "http://localhost:1/film.mp4"):
        assert "No such file" in refusal(films["mp4"].parent / name)
