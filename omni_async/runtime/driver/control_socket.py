"""Serves requests to a running job on a unix socket in its run folder.

A request reads the status, changes the number of workers, or stops the run.

Every user who may write to the socket's file (mode 0600: the user who runs the job) may use it. Nothing listens on a
network. A request is one line of JSON; its answer is one line too, optionally preceded by lines about what it waits
for. The server waits for requests; the session that is alive at that moment answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_async.config.decoding import decode_json
from omni_async.config.reading import require_within
from omni_async.config.redact import redact_text
from omni_async.records.write.files import keep_from_children

MOST_WORKERS = 100_000
_LONGEST_REQUEST = 2**16
_LONGEST_ANSWER = 2**24
_MOST_CLIENTS = 64
_PATIENCE_S = 10.0  # for a client's line, and for it to receive its answer
_BEAT_S = 10.0  # interval of lines while a run changes its workers
_ANSWER_S = 30.0


class ControlError(RuntimeError):
    """Raised when the run cannot be reached, or cannot fulfil the request; the text is one line."""


class NotRunning(ControlError):
    """Raised when no process serves the socket."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to a running job.

    `scale`: role -> its new number of workers; `stop`: end as with Ctrl-C. With neither, the request reads only the
    status."""

    scale: dict[str, Annotated[int, Meta(ge=1, le=MOST_WORKERS)]] = {}
    stop: bool = False


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer, with exactly one of the fields.

    `doing`: the reason why the answer takes a while, empty if unchanged; another line follows."""

    status: dict[str, Any] | None = None
    error: str | None = None
    doing: str | None = None


Tell = Callable[[str], None]


class ControlSocket:
    """A server of requests: `async with ControlSocket(path) as control: control.answer = ...`.

    On a filesystem without sockets the run continues without it. `doing`: what the run does while no session answers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.AbstractServer | None = None
        self._num_clients = 0
        self.answer: Callable[[Request, Tell], Awaitable[dict[str, Any]]] | None = None
        self.stop: Callable[[], None] | None = None
        self.doing = "starting"

    async def __aenter__(self) -> ControlSocket:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            listening = keep_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with _short(self._path) as short:
                umask = os.umask(0o177)
                try:
                    listening.bind(short)
                finally:
                    os.umask(umask)
            self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=_LONGEST_REQUEST)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(text: str) -> None:
            if not writer.is_closing():  # the client may have gone
                writer.write(msgspec.json.encode(Answer(doing=redact_text(text))) + b"\n")

        self._num_clients += 1
        try:
            if self._num_clients > _MOST_CLIENTS:
                busy = f"it is busy: {_MOST_CLIENTS} clients ask already; try again in {_PATIENCE_S:g} s"
                writer.write(msgspec.json.encode(Answer(error=busy)) + b"\n")
                return
            async with asyncio.timeout(_PATIENCE_S):
                line = await reader.readline()
            beating = asyncio.create_task(_beat(tell), name="say that the answer takes a while")
            try:
                answer = await self._answer(line, tell)
            finally:
                beating.cancel()
            writer.write(msgspec.json.encode(answer, enc_hook=str) + b"\n")
            async with asyncio.timeout(_PATIENCE_S):
                await writer.drain()
        except (ConnectionError, ValueError, TimeoutError):  # the client has gone, sent too much, or is too slow
            pass
        finally:
            self._num_clients -= 1
            writer.close()

    async def _answer(self, line: bytes, tell: Tell) -> Answer:
        try:
            request = decode_json(line, Request)
            if request.stop and self.stop is not None:  # also while no session is alive
                doing = {} if self.answer is not None else {"doing": self.doing}
                self.stop()
                return Answer(status=doing)
            if self.answer is None and request.scale:
                return Answer(error=f"nothing can be changed yet: the run is {self.doing}")
            if self.answer is None:
                return Answer(status={"doing": self.doing, "parts": {}})
            return Answer(status=await self.answer(request, tell))
        except Exception as error:  # noqa: BLE001 (the client gets the error, and the run continues)
            text = redact_text(str(error).partition("\n")[0])
            return Answer(error=text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")


async def _beat(tell: Tell) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        tell("")


def ask(path: Path, request: Request, timeout_s: float = _ANSWER_S, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Send a request and return the run's answer.

    Args:
        path: the socket in the run's folder.
        request: the request to send.
        timeout_s: seconds to wait for the answer; if workers are to be changed, for each line of it.
        tell: receives what the run waits for meanwhile.

    Raises:
        NotRunning: no process serves the socket, or it leads out of its folder.
        ControlError: no answer in time, any other error, or a request that cannot be fulfilled."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        end, received = time.monotonic() + timeout_s, bytearray()
        try:
            require_within(path, path.parent)
            with _short(path) as short:
                connection.connect(short)
            with contextlib.suppress(ConnectionError):  # a busy run answers and closes before it reads
                connection.sendall(msgspec.json.encode(request) + b"\n")
            while (answer := _read(path, _line(connection, received, end))).doing is not None:
                if answer.doing:
                    tell(answer.doing)
                if request.scale:
                    end = time.monotonic() + timeout_s
        except BlockingIOError:
            raise ControlError(f"{path.parent}: {path.name} is busy: too many clients wait; try again") from None
        except TimeoutError:
            raise ControlError(f"{path.parent}: {path.name} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise NotRunning(f"{path.parent} is not running here: {path.name}: {error.strerror or error}") from None
    if answer.status is None:
        raise ControlError(f"{path.parent}: {answer.error}")
    return answer.status


def _line(connection: socket.socket, received: bytearray, end: float) -> bytes:
    """Return the next line, or less if the connection ends or the line is too long.

    received: bytes received after the previous line. Raises TimeoutError if the line is incomplete at `end`."""
    seen = 0
    while (at := received.find(b"\n", seen)) < 0 and len(received) < _LONGEST_ANSWER:
        seen = len(received)
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (content := connection.recv(2**16)):
            break
        received += content
    line = bytes(received[: at + 1])
    del received[: at + 1]
    return line


def _read(path: Path, line: bytes) -> Answer:
    try:
        answer: Answer = decode_json(line, Answer)
        return answer
    except msgspec.DecodeError:
        raise ControlError(f"{path.parent} ended before it answered") from None


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the path that fits into a socket's address, whose 108 bytes a run folder may exceed."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
