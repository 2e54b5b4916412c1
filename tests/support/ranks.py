"""Calls a function on new processes that are the ranks of a process group.

They are forked from a server that has imported what ranks need."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from tests.support.forked import start_method

_NOT_CONNECTED = "connectFullMesh failed"


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of `work(rank, ranks, init_method, *args)` on each of `ranks` new single-threaded processes.

    `work`, a function of a module, creates the process group; the ranks leave it together. If gloo closes a connection
    while a group is created, everything is repeated once."""
    method = start_method("omni_async.training.engine", "tests.support.fakes")
    for may_fail in (True, False):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            # Plain pickle copies tensors. As arguments of a process each needs a file descriptor, of which 256 fit.
            given = ranks, folder, dict(os.environ), pickle.dumps((work, args))
            try:
                start_processes(_run, given, nprocs=ranks, start_method=method)
            except ProcessRaisedException as error:
                if not may_fail or _NOT_CONNECTED not in str(error):
                    raise
            else:
                return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(ranks)]
    raise AssertionError("the last attempt returns or raises")


def _run(rank: int, ranks: int, folder: str, environment: dict[str, str], job: bytes) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    work, args = pickle.loads(job)
    result = work(rank, ranks, f"file://{folder}/rendezvous", *args)
    _result(folder, rank).write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        # A rank with complete connections can finish with a group while another rank still connects. If it left, the
        # other rank would see a lost connection. On the CPU, because every group has gloo there.
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pkl"
