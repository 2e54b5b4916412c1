"""Serves torch.distributed's TCP store on one address, and finds the address and interface towards a store.

The port is bound once, by the process that serves, and published afterwards: no other process can take it in between.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed

# torch's annotations leave out the parts that are used here.
dist: Any = torch.distributed


def serve_store(host: str, timeout_s: float) -> Any:
    """Serve a store at a free port of `host` for as long as the returned `TCPStore` lives; `port` is its port.

    It listens only on this address; torch's own socket would listen on all addresses of the machine. Raises
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


def address_towards(host: str, port: int) -> str:
    """Return this machine's own address on the way to `host`; nothing is sent. Raises OSError without a way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def interface_towards(host: str, port: int) -> str | None:
    """Return the network interface that has this machine's own address on the way to `host`.

    None if no interface has it. Raises OSError without a way."""
    mine = address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == mine for one in addresses):
            return name
    return None
