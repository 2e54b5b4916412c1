from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from omni_async.tracking.files import write_atomic


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"old")
    write_atomic(tmp_path / "page", b"new")
    assert (tmp_path / "page").read_bytes() == b"new" and [*tmp_path.iterdir()] == [tmp_path / "page"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "folder", b"new")
    assert (tmp_path / "folder").is_dir() and len([*tmp_path.iterdir()]) == 2


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomic(tmp_path / "pipe", b"content")
    reader.join()
    assert read == [b"content"] and (tmp_path / "pipe").is_fifo()


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    before = Path("/dev/full").stat().st_rdev
    with pytest.raises(OSError, match="No space left"):
        write_atomic(Path("/dev/full"), b"content")
    assert Path("/dev/full").is_char_device() and Path("/dev/full").stat().st_rdev == before
