"""Tests that readers of a user's files refuse a path that is not a file at once, in one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from omni_async.commands.bench.result import read_overlap
from omni_async.config import ConfigError, load
from omni_async.config.decoding import decode_json
from omni_async.config.reading import OutsideError, TooLargeError, open_file, read_file, require_file
from omni_async.data.preferences import PreferencePairs
from omni_async.data.prompts import load_prompts
from omni_async.performance.profile import load_profile
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write.files import read_lines
from omni_async.records.write.summary import read_ending, read_summary
from tests.support.patience import PATIENCE


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _extending(base: Path) -> Path:
    own = base.with_name("own.yaml")
    own.write_text("extends: base.yaml\n")
    return own


_KINDS = [
    pytest.param(Path.mkdir, "a folder", id="folder"),
    pytest.param(os.mkfifo, "a named pipe", id="pipe"),
    pytest.param(_make_socket, "a socket", id="socket"),
    pytest.param(lambda path: path.symlink_to("/dev/zero"), "a device", id="device"),
]
_READERS = {
    "prompts.txt": lambda path: load_prompts(str(path), "data.prompts", 50),
    "pairs.parquet": lambda path: PreferencePairs(str(path)),
    "profile.json": lambda path: load_profile(str(path)),
    "recipe.yaml": load,
    "base.yaml": lambda path: load(_extending(path)),
}


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(("make", "kind"), _KINDS)
@pytest.mark.parametrize("name", _READERS)
def test_paths_that_are_no_files(tmp_path: Path, name: str, make: Callable[[Path], None], kind: str) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"^.*{name}.*it is {kind}, not a file.*\Z"):
        _READERS[name](tmp_path / name)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("read", [read_lines, read_summary, lambda path: [*read_trace(path)], read_overlap])
def test_run_files_that_are_pipes(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "left.json")
    assert read_ending(tmp_path / "left.json") == (None, 0), "a run whose summary is a pipe has no known end"
    with pytest.raises((OSError, ConfigError), match="it is a named pipe, not a file"):
        read(tmp_path / "left.json")


def test_links_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"12345" == read_file(tmp_path / "link", 5)
    with open_file(tmp_path / "file") as file:
        assert file.read() == b"12345"
    with pytest.raises(TooLargeError) as refused:
        read_file(tmp_path / "file", 4)
    assert refused.value.strerror == "larger than 4 bytes"
    with pytest.raises(FileNotFoundError):
        require_file(tmp_path / "nowhere")


def test_files_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for path in (tmp_path / "secret", folder / "below" / "own"):
        path.write_bytes(b"12345")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path, target_is_directory=True)
    (folder / "in").symlink_to("below/own")
    (tmp_path / "folder.secret").write_bytes(b"12345")  # shares the folder's name but is not below it
    (tmp_path / "named").symlink_to(folder, target_is_directory=True)
    for root in (folder, tmp_path / "named"):
        for inside in ("below/own", "in", "below/../in"):
            assert read_file(root / inside, within=root) == b"12345"
        for outside in ("out", "up/secret", "../secret", "../folder.secret", tmp_path / "secret"):
            with pytest.raises(OutsideError, match="out of its folder"):
                read_file(root / outside, within=root)


def test_hostile_json() -> None:
    assert decode_json(b'{"a": [1, 2]}') == {"a": [1, 2]}
    for content, complaint in (
        (b"[" + b"[]," * 10**6 + b"0]", "more than 1000000 values"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"a": "\xff"}', "."),
        (b"1e400", "out of range"),
        (b"nan", "."),
    ):
        with pytest.raises(msgspec.DecodeError, match=complaint):
            decode_json(content)
