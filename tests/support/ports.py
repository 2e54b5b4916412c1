"""Provides an address at which nobody listens, for as long as a test needs it, and lists who listens at a port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def unused_address() -> Iterator[str]:
    """Yield `127.0.0.1:PORT`, which refuses connections: the port is bound, and its socket does not listen."""
    with socket.socket() as keeping:
        keeping.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{keeping.getsockname()[1]}"


def listening_at(port: int) -> list[str]:
    """Return the addresses at which this process listens at the port."""
    listening = (one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return [one.laddr.ip for one in listening if one.laddr.port == port]
