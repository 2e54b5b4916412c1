"""Runs work on several trainer ranks, processes of their own over gloo."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from omni_async.training.device import init_process_group


def _run(rank: int, world: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, world, f"file://{folder}/rendezvous", timeout=120.0, device=torch.device("cpu"))
    (folder / f"rank{rank}.pkl").write_bytes(pickle.dumps(work(rank, *args)))
    dist.destroy_process_group()


def on_ranks(world: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns what `work(rank, *args)`, a function of a module, returns on each of `world` ranks."""
    mp.spawn(_run, (world, folder, work, args), nprocs=world, join=True)
    return [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(world)]
