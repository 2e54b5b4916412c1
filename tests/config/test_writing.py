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


def test_files_links_and_devices_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "page").write_bytes(b"old")
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "plain").touch()
    for name in ("pipe", "device", "link", "page", "secret", "new", "n" * 255, "ü" * 127, "n" * 250 + ".json"):
        path = tmp_path / name
        write_atomic(path, b"content")
        assert path.read_bytes() == b"content" and not path.is_symlink() and path.is_file()
    assert (tmp_path / "target").read_bytes() == b"kept" and len([*tmp_path.iterdir()]) == 11
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode, "the umask's"


def test_pipes_and_devices_that_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomic(tmp_path / "pipe", b"content", streams=True)
    reader.join()
    assert read == [b"content"] and (tmp_path / "pipe").is_fifo()
    before = Path("/dev/full").stat().st_rdev
    with pytest.raises(OSError, match="No space left"):
        write_atomic(Path("/dev/full"), b"content", streams=True)
    assert Path("/dev/full").is_char_device() and Path("/dev/full").stat().st_rdev == before


def test_results_that_cannot_be_moved_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(OSError, match="busy; the result is at") as refused:
        write_atomic(tmp_path / "mounted", b"content")
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"content" and str(kept) in str(refused.value) and is_partial(kept)


def test_failed_writes_leave_the_former_file(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "folder", b"new")
    with pytest.raises(OSError), replacing(tmp_path / "page.png") as unfinished:
        assert unfinished.suffix == ".png" and unfinished.parent == tmp_path
        unfinished.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "page.png").read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", tmp_path / "page.png"]


@pytest.mark.parametrize("opened", [open_append, open_lock, open_update, lambda path: append(path, b"x")])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "device", "folder"])
def test_only_plain_files_are_written_in_place(tmp_path: Path, opened: Callable[[Path], object], kind: str) -> None:
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
