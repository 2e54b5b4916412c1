"""Chooses how tests start processes that import torch: forked from a server, which has imported it once."""

import multiprocessing

import torch


def start_method(*imported: str) -> str:
    """Return a start method of `multiprocessing`: "forkserver", or "spawn" on a machine with an accelerator.

    A test process has one server, with the modules that its first caller names; a fork imports others itself. Imports
    must compute nothing: a fork has no threads of torch, and no driver of an accelerator."""
    if torch.accelerator.is_available():
        return "spawn"
    multiprocessing.set_forkserver_preload([*imported])
    return "forkserver"
