"""Calls a function on new processes that are the ranks of a process group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import ProcessRaisedException, spawn

_NOT_CONNECTED = "connectFullMesh failed"


def on_ranks(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Call `work(rank, ranks, init_method, *args)`, a function of a module, on each of `ranks` new processes.

    On a busy machine, gloo now and then closes a connection while a group is made. Then all is done once more."""
    for may_fail in (True, False):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            try:
                spawn(work, (ranks, f"file://{folder}/rendezvous", *args), nprocs=ranks)
                return
            except ProcessRaisedException as error:
                if not may_fail or _NOT_CONNECTED not in str(error):
                    raise
