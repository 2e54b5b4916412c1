"""Provides an address at which nobody listens, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def unused_address() -> Iterator[str]:
    """Yield `127.0.0.1:PORT`, which refuses connections: the port is bound, and its socket does not listen."""
    with socket.socket() as keeping:
        keeping.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{keeping.getsockname()[1]}"
