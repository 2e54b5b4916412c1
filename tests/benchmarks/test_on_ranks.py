"""Tests what ranks return, that they leave together, and that those which gloo could not connect are started once
more, and those with another error are not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from benchmarks.ranks import on_ranks
from omni_async.training.device import init_process_group
from tests.support.patience import PATIENCE, wait_for


def fail(rank: int, ranks: int, init_method: str, folder: Path, texts: list[str]) -> int:
    """Raises the next of `texts` each time, and once there are none returns how often it was called."""
    times = len([*folder.iterdir()])
    (folder / f"{times}").write_text(f"{rank} of {ranks} at {init_method}")
    if times < len(texts):
        raise RuntimeError(texts[times])
    return times + 1


def be_late(rank: int, ranks: int, init_method: str) -> tuple[int, bool]:
    """Returns the rank, and whether rank 0 stays for a while after it has left its result."""
    init_process_group(rank, ranks, init_method, PATIENCE, torch.device("cpu"))
    first = torch.tensor([os.getpid()])
    dist.broadcast(first, 0)
    if rank > 0:
        wait_for((Path(urlsplit(init_method).path).parent / "rank0.pkl").exists, "the result of rank 0")
        with contextlib.suppress(psutil.TimeoutExpired):
            psutil.Process(int(first)).wait(1.5)
    return rank, psutil.pid_exists(int(first))


def test_ranks_leave_together() -> None:
    assert on_ranks(2, be_late) == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("texts", "started", "error"),
    [
        (["Gloo connectFullMesh failed with ..."], 2, None),
        pytest.param(["Gloo connectFullMesh failed with ..."] * 2, 2, "connectFullMesh", marks=pytest.mark.thorough),
        (["shapes differ"], 1, "shapes differ"),
    ],
)
def test_ranks_that_were_not_connected_are_started_once_more(
    tmp_path: Path, texts: list[str], started: int, error: str | None
) -> None:
    if error is None:
        assert on_ranks(1, fail, tmp_path, texts) == [started]
    else:
        with pytest.raises(ProcessRaisedException, match=error):
            on_ranks(1, fail, tmp_path, texts)
    said = {path.read_text() for path in tmp_path.iterdir()}
    assert len(said) == started, "each with a rendezvous of its own"
    assert all(one.startswith("0 of 1 at file://") for one in said)
