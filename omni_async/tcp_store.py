"""Serves torch.distributed's TCP store on one address.

The port is bound once, by the process that serves, and published afterwards: no other process can take it in between.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

# torch's annotations leave out the parts that are used here.
dist: Any = torch.distributed


def serve_store(host: str, timeout_s: float) -> Any:
    """Serve a store at a free port of `host` for as long as the returned `TCPStore` lives; `port` is its port.

    It listens on this address alone; torch's own socket would listen on all addresses of the machine. Raises
    RuntimeError or OSError."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
            use_libuv=False,  # libuv's store takes no socket
        )


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Connect to the store that another process, or this one, serves. Raises RuntimeError or OSError."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, use_libuv=False)
