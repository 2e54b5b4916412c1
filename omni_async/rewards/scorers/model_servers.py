"""Calls equivalent servers over HTTP: reward servers, and judges behind an OpenAI-compatible endpoint.

- A request goes to the server with the fewest of our requests. A server that failed, or that lost to a hedge several
  times in a row, is the last choice for `timeout_s`.
- A request without an answer, or answered by a server that reports itself busy, is sent again after a pause, to another
  server if there is one. The pause doubles and is randomized, so that clients do not retry together.
- A request that a server refuses as wrong is not sent again.

Waits for answers, each at most `timeout_s`, for the pauses, and, if the servers are a role of the run, until one of its
workers is ready. Everything runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import aiohttp
from msgspec import Meta
from yarl import URL

from omni_async.aio.backoff import Backoff
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import cancel
from omni_async.config.proxies import proxy_for, through
from omni_async.config.redact import one_line
from omni_async.rewards.base import Addresses, Outage, ScoreError

T = TypeVar("T")

Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Retries = Annotated[int, Meta(ge=0, le=100)]
Connections = Annotated[int, Meta(ge=1, le=10_000)]

_LARGEST_ANSWER = 2**26
_READ_HERE = 2**16  # bytes of an answer that is read on the event loop; a larger one is read in a thread
_LARGEST_HEADER = 8190  # bytes of a line of the answer's head, and of a field of it
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
# How long the addresses of a role are used before they are requested again.
_FRESH_S = 5.0
# A server that is slow now and then loses a race; a server that hangs loses every race.
_MOST_LOST = 3


class BadAnswer(Exception):
    """A server's answer is not an answer to the request; another server, or a retry, may succeed."""


class _Failed(Exception):
    """An attempt failed, and another may succeed. `down`: nothing answered, or a server reported that it cannot now."""

    def __init__(self, why: str, *, down: bool, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.down = down
        self.pause_s = pause_s


@dataclass(eq=False)
class _Server:
    """A server, the number of our requests it has, its last failure, and the races it lost since it last answered."""

    url: str
    token: str | None
    of_run: bool = False  # started by the run, on machines that a proxy need not know
    running: int = 0
    failed_at: float = -math.inf
    lost: int = 0


@dataclass(frozen=True)
class Question:
    """A request: `body` is posted to `path` below a server's URL, with `headers`."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class ModelServers:
    """Servers with these `urls`, and the servers of a role of the run, if one is named."""

    def __init__(
        self,
        urls: Sequence[str],
        role: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float,
        hedge_s: float | None,
        retries: int,
        pauses: Backoff,
        connections: int,
    ) -> None:
        """Store the settings; nothing is opened yet. ValueError without any server, or if the token cannot be sent.

        Args:
            urls: of existing servers; `token` is sent to each of them.
            role: a role of the run whose workers are also servers; their addresses contain their tokens.
            token: a secret.
            timeout_s: the longest time of one attempt.
            hedge_s: after this time a second server is called concurrently, and the first answer counts; None: never.
            retries: attempts after the first one.
            pauses: before them.
            connections: the most that are open at once."""
        if not urls and role is None:
            raise ValueError("give urls, or the name of a server of reward.servers")
        if token is not None and not (token.isprintable() and token.isascii()):
            raise ValueError("token: expected printable ASCII characters")
        self._fixed = [_Server(url.rstrip("/"), token) for url in urls]
        self._of_role: list[_Server] = []
        self._role = role
        self._addresses: Addresses | None = None
        self._asked_at = -math.inf
        self._timeout_s, self._hedge_s = timeout_s, hedge_s
        self._retries, self._pauses = retries, pauses
        self._connections = connections
        self._jitter = random.Random()
        self._session: aiohttp.ClientSession | None = None

    def connect(self, addresses: Addresses) -> None:
        """Store the function that returns the addresses of a role."""
        self._addresses = addresses

    @property
    def servers(self) -> list[_Server]:
        return [*self._fixed, *self._of_role]

    async def ask(self, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]) -> T:
        """Post a request; return the result of `read` for a server's answer.

        Args:
            question: the request to post.
            read: converts the body of an answer; raises BadAnswer or a ScoreError for any other body.
            refusal: returns the server's own words in the body of a refusal, or an empty text.

        Raises:
            Outage: no server can answer now.
            ScoreError: a server refused, or no answer could be read."""
        tried: list[_Server] = []
        while True:
            try:
                await self._find_servers()
                return await self._hedged(question, read, refusal, tried)
            except _Failed as error:
                if len(tried) > self._retries:
                    kind = Outage if error.down else ScoreError
                    raise kind(f"{error} (asked {len(tried)} times)" if len(tried) > 1 else str(error)) from None
                longest = self._pauses.pause_s(max(1, len(tried)))
                pause_s = max(self._jitter.uniform(longest / 2, longest), min(error.pause_s, self._pauses.longest_s))
            await asyncio.sleep(pause_s)

    # ---- choosing a server -------------------------------------------------------------------------------------------

    async def _find_servers(self) -> None:
        """Request the addresses of the role, if there is a role and they are not fresh. Raises Outage."""
        now = asyncio.get_running_loop().time()
        if self._role is None or (self._of_role and now - self._asked_at < _FRESH_S):
            return
        if self._addresses is None:
            raise ScoreError(f"the servers of {self._role!r} are started by a run; without one, give their urls")
        try:
            async with asyncio.timeout(None if not self.servers else self._timeout_s):
                found = await self._addresses(self._role)
        except TimeoutError:
            return
        self._asked_at = asyncio.get_running_loop().time()
        known = {(one.url, one.token, one.of_run): one for one in self._of_role}
        # If the recipe gives a server's address, its name contains the address (`addresses.urls_of`).
        split = [(*_split(address), " at " not in name) for name, address in found.items()]
        self._of_role = [known.get(one) or _Server(*one) for one in split]
        if not self.servers:
            raise Outage(f"no server of {self._role!r} is ready")

    def _next(self, busy: Sequence[_Server]) -> _Server:
        """Return the least loaded server, preferring servers that are not in `busy` and have not failed lately."""
        since = asyncio.get_running_loop().time() - self._timeout_s

        def order(one: _Server) -> tuple[bool, bool, int, float]:
            return one in busy, one.failed_at > since, one.running, self._jitter.random()

        return min(self.servers, key=order)

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _hedged(
        self, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str], tried: list[_Server]
    ) -> T:
        """Return the first answer: of one server, or also of a second one if the first takes longer than `hedge_s`."""
        first = self._next(tried[-1:])
        tried.append(first)
        second, begun = first, self._begin(first, question, read, refusal)
        calls = {begun}
        try:
            done, _ = await asyncio.wait(calls, timeout=self._hedge_s)
            if not done:
                second = self._next([first])
                calls.add(self._begin(second, question, read, refusal))
            running: set[asyncio.Task[T]] = calls
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                errors = [call.exception() for call in done]
                for call, error in zip(done, errors, strict=True):
                    if error is None:
                        self._lose(first, call is not begun and second is not first)
                        return call.result()
                if not running:
                    raise next(error for error in errors if error is not None)
        finally:
            await cancel(calls)

    def _lose(self, server: _Server, outrun: bool) -> None:
        """Record whether a hedge answered before the first server."""
        server.lost = server.lost + 1 if outrun else 0
        if server.lost >= _MOST_LOST:
            server.failed_at = asyncio.get_running_loop().time()

    def _begin(
        self, server: _Server, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]
    ) -> asyncio.Task[T]:
        """Begin an attempt, which counts at once, because the next server may be chosen before this task runs."""
        server.running += 1
        attempt = asyncio.create_task(self._attempt(server, question, read, refusal))

        def ended(_: asyncio.Task[T]) -> None:
            server.running -= 1

        attempt.add_done_callback(ended)
        return attempt

    async def _attempt(
        self, server: _Server, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]
    ) -> T:
        try:
            answer = await self._post(server, question, read, refusal)
        except _Failed as error:
            server.failed_at = asyncio.get_running_loop().time()
            if error.down:
                self._asked_at = -math.inf  # a missing worker may have been replaced
            raise
        server.failed_at = -math.inf
        return answer

    async def _post(
        self, server: _Server, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]
    ) -> T:
        response, content = await self._exchange(server, "POST", question)
        if response.status == 200:
            try:
                return await _read_by(read, content)
            except BadAnswer as error:  # the server ended in the middle of it, or is a server of another kind
                raise _Failed(f"{server.url} {error}", down=False) from None
            except ScoreError as error:
                raise type(error)(f"{server.url} {error}") from None
        words = one_line(await _read_by(refusal, content), 300)
        why = f"{server.url} answered {response.status}" + (f": {words}" if words else "")
        if response.status in _BUSY:
            raise _Failed(why, down=True, pause_s=_seconds(response.headers.get("Retry-After", "")))
        raise ScoreError(why)

    async def fetch(self, path: str) -> list[bytes]:
        """Return the bodies at `path` of all servers that have it and can answer now."""

        async def of(server: _Server) -> bytes | None:
            try:
                response, content = await self._exchange(server, "GET", Question(path, b""))
            except (_Failed, ScoreError):
                return None
            return content if response.status == 200 else None

        return [content for content in await asyncio.gather(*map(of, self.servers)) if content is not None]

    async def _exchange(self, server: _Server, method: str, question: Question) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a request, and return the answer with its body. Raises _Failed, or ScoreError for an endless answer."""
        headers = {"Accept-Encoding": "identity"} | question.headers
        if server.token is not None:
            headers["Authorization"] = f"Bearer {server.token}"
        url = server.url + question.path
        proxy = None if server.of_run else proxy_for(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = self._opened().request(
                    method, url, data=question.body or None, headers=headers, allow_redirects=False, proxy=proxy
                )
                async with asked as response:
                    return response, await read_body(response)
        except TimeoutError:
            why = f"did not answer within {self._timeout_s:g} s{through(proxy)}"
            raise _Failed(f"{server.url} {why}", down=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an unknown kind of proxy
            why = one_line(str(error) or type(error).__name__, 300)
            raise _Failed(f"{server.url} cannot be asked{through(proxy)}: {why}", down=True) from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A compressed answer could have any size, and a redirect would take the token elsewhere. The library's own
            # time-outs (300 s, 30 s to connect) would end attempts before `timeout_s`. A server's cookies are ignored.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=_LARGEST_HEADER,
                max_field_size=_LARGEST_HEADER,
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


async def _read_by(read: Callable[[bytes], T], content: bytes) -> T:
    """Return the result of `read` for a body of any size, without blocking the event loop."""
    return read(content) if len(content) <= _READ_HERE else await in_daemon_thread(read, content)


def _split(address: str) -> tuple[str, str | None]:
    """Return the URL of an address, and the token before its host, if any."""
    url = URL(address)
    return str(url.with_user(None)).rstrip("/"), url.password


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. ScoreError if it exceeds the bound."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            raise ScoreError(f"{response.url} answers with more than {_LARGEST_ANSWER} bytes")
    return bytes(content)


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After`; 0 for a date."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0.0
