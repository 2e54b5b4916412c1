"""Opens the sockets of this project's servers, checks who may use them, and reports the signal that ends a server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket

from omni_async.config import ConfigError
from omni_async.config.redact import REFERENCE, resolve_references

_SHORTEST_TOKEN = 16


def read_token(reference: str | None, key: str) -> str | None:
    """Return the secret itself; ConfigError if its variable is not set, or it is too short.

    Args:
        reference: `env:NAME`, the environment variable with the secret; None without a secret.
        key: the configuration key of the reference, for messages."""
    if reference is None:
        return None
    if not reference.startswith(REFERENCE):
        raise ConfigError(f"{key}: expected env:NAME, the environment variable that holds it")
    try:
        token = str(resolve_references(reference, key))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{key}: expected {_SHORTEST_TOKEN} or more printable ASCII characters in {reference}")
    return token


def require_token(host: str, token: str | None, host_key: str, token_key: str) -> None:
    """Raise ConfigError if other machines reach the host and there is no token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{token_key}: required where {host_key} = {host} is reached from other machines; give env:NAME"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int, key: str) -> socket.socket:
    """Return a socket that is bound to the address. If binding fails, raise ConfigError, which begins with `key`."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, number)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"{key}: cannot listen at {host}:{port}: {error.strerror or error}") from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Return a listening socket's URL for a browser, with the machine's name if it listens at all addresses."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end_signal() -> asyncio.Future[int]:
    """Return a future of the exit code: 130 at Ctrl-C, 0 at a machine's signal. Any later signal ends the process.

    Machines send SIGTERM, SIGHUP when a terminal closes, and SIGUSR1 or SIGUSR2 before a batch job's time is up. A
    signal of the latter three that was ignored when the process started, as SIGHUP is under nohup, stays ignored."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: signal.Signals) -> None:
        for one in codes:
            loop.remove_signal_handler(one)
        ended.set_result(codes[number])

    warnings = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    heeded = [one for one in warnings if signal.getsignal(one) is not signal.SIG_IGN]
    codes = {signal.SIGINT: 130, signal.SIGTERM: 0} | dict.fromkeys(heeded, 0)
    with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread, which alone gets signals
        for one in codes:
            loop.add_signal_handler(one, end, one)
    return ended
