from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_async.config.writing import append, is_partial, open_append, open_lock, open_update, replacing, write_atomic
from tests.support.patience import PATIENCE


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
    write_atomic(tmp_path / "pipe", b"content", streams=True)
    reader.join()
    assert read == [b"content"] and (tmp_path / "pipe").is_fifo()


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_that_nobody_named_is_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "summary.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/null")
    write_atomic(path, b"content")
    assert path.read_bytes() == b"content" and not path.is_symlink() and path.is_file()


def test_the_mode_of_a_file_is_kept_and_a_new_one_gets_that_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "plain").touch()
    for name in ("secret", "new"):
        write_atomic(tmp_path / name, b"content")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_result_that_cannot_be_moved_into_place_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(OSError, match="busy; the result is at") as refused:
        write_atomic(tmp_path / "mounted", b"content")
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"content" and str(kept) in str(refused.value) and is_partial(kept)


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    before = Path("/dev/full").stat().st_rdev
    with pytest.raises(OSError, match="No space left"):
        write_atomic(Path("/dev/full"), b"content", streams=True)
    assert Path("/dev/full").is_char_device() and Path("/dev/full").stat().st_rdev == before


def test_a_link_at_the_path_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "out").symlink_to("target")
    write_atomic(tmp_path / "out", b"new")
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert (tmp_path / "out").read_bytes() == b"new" and not (tmp_path / "out").is_symlink()


def test_what_cannot_be_written_whole_leaves_the_former_file(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_bytes(b"old")
    with pytest.raises(OSError), replacing(tmp_path / "page.png") as unfinished:
        assert unfinished.suffix == ".png" and unfinished.parent == tmp_path
        unfinished.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "page.png").read_bytes() == b"old" and [*tmp_path.iterdir()] == [tmp_path / "page.png"]


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "n" * 250 + ".json"])
def test_a_name_as_long_as_names_can_be_is_written(tmp_path: Path, name: str) -> None:
    write_atomic(tmp_path / name, b"x")
    assert (tmp_path / name).read_bytes() == b"x"


@pytest.mark.parametrize("opened", [open_append, open_lock, open_update, lambda path: append(path, b"x")])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "device", "folder"])
def test_nothing_but_a_plain_file_is_written_in_place(
    tmp_path: Path, opened: Callable[[Path], object], kind: str
) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    path = tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": "target", "dangling link": "none", "device": "/dev/null"}[kind])
    with pytest.raises(OSError):
        opened(path)
    assert (tmp_path / "target").read_bytes() == b"kept" and not (tmp_path / "none").exists()


def test_a_second_holder_of_a_lock_is_refused(tmp_path: Path) -> None:
    with open_lock(tmp_path / "lock"), pytest.raises(BlockingIOError):
        open_lock(tmp_path / "lock")
    open_lock(tmp_path / "lock").close()


def test_an_append_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"first\n")
    with largest_file(10), pytest.raises(OSError):
        append(tmp_path / "lines", b"second line\n")
    assert (tmp_path / "lines").read_bytes() == b"first\n"


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
