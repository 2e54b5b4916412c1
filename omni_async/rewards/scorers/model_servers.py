"""Asks servers that answer alike, over HTTP: reward servers, and judges behind an OpenAI-compatible endpoint.

A request goes to the server that has the fewest of ours; one that failed, or was outrun by a hedge several times in a
row, is asked last for `timeout_s`. What is not
answered, or answered by a server that says it is busy, is asked again after a pause, which doubles and varies at random
so that clients do not return together; another server, if there is one. What a server refuses as wrong is not sent
again. Waits for answers, each `timeout_s` at most, for the pauses, and, where servers are a role of the run, until one
of its workers is ready. Everything runs on the caller's event loop.
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
_READ_HERE = 2**16  # bytes of an answer that is read on the event loop; a larger one in a thread
_LARGEST_HEADER = 8190  # of a line of the answer's head, and of a field of it
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
# How long the addresses of a role are used before they are asked for again.
_FRESH_S = 5.0
# A server that answers slowly now and then loses a race; one that hangs loses all of them.
_MOST_LOST = 3


class BadAnswer(Exception):
    """A server answered, but not what was asked for; another, or the same once more, may."""


class _Failed(Exception):
    """An attempt failed, and another may not. `down`: nothing answered, or a server said that it cannot now."""

    def __init__(self, why: str, *, down: bool, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.down = down
        self.pause_s = pause_s


@dataclass(eq=False)
class _Server:
    """A server, the requests that it has of ours, when it failed and the races it lost, since it last answered."""

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
    """Servers with these `urls`, and those of a role of the run, if one is named."""

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
        """Remember how to ask; nothing is opened yet. ValueError if there is nobody to ask, or no token could be sent.

        Args:
            urls: of servers that are there already; `token` is sent to each of them.
            role: one of the run whose workers are servers, too; their addresses hold their tokens.
            token: a secret.
            timeout_s: longest that one attempt may take.
            hedge_s: after so long a second server is asked, too, and the first answer counts; None: never.
            retries: attempts after the first one.
            pauses: before them.
            connections: most that are open at once."""
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
        """Take the function that tells the addresses of a role."""
        self._addresses = addresses

    @property
    def servers(self) -> list[_Server]:
        return [*self._fixed, *self._of_role]

    async def ask(self, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]) -> T:
        """Return what `read` makes of a server's answer.

        Args:
            question: what is posted.
            read: takes the body of an answer; raises BadAnswer or a ScoreError for one that is none.
            refusal: returns the server's own words in the body of a refusal, or an empty text.

        Raises:
            Outage: no server can answer now.
            ScoreError: a server refused, or none gave an answer that could be read."""
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

    # ---- whom to ask -------------------------------------------------------------------------------------------------

    async def _find_servers(self) -> None:
        """Ask for the addresses of the role, if there is one, and it was not asked lately. Raises Outage."""
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
        # Of a server that the recipe gives the name ends in its address (`addresses.urls_of`).
        split = [(*_split(address), " at " not in name) for name, address in found.items()]
        self._of_role = [known.get(one) or _Server(*one) for one in split]
        if not self.servers:
            raise Outage(f"no server of {self._role!r} is ready")

    def _next(self, busy: Sequence[_Server]) -> _Server:
        """Return the server to ask: not one of `busy` if others are left, none that failed lately, the least loaded."""
        since = asyncio.get_running_loop().time() - self._timeout_s

        def order(one: _Server) -> tuple[bool, bool, int, float]:
            return one in busy, one.failed_at > since, one.running, self._jitter.random()

        return min(self.servers, key=order)

    # ---- asking ------------------------------------------------------------------------------------------------------

    async def _hedged(
        self, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str], tried: list[_Server]
    ) -> T:
        """Return the first answer: of one server, or also of a second one if that takes longer than `hedge_s`."""
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
        """Note whether a hedge answered before the server that was asked first."""
        server.lost = server.lost + 1 if outrun else 0
        if server.lost >= _MOST_LOST:
            server.failed_at = asyncio.get_running_loop().time()

    def _begin(
        self, server: _Server, question: Question, read: Callable[[bytes], T], refusal: Callable[[bytes], str]
    ) -> asyncio.Task[T]:
        """Begin an attempt, which counts at once: the next one is chosen before this task runs."""
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
                self._asked_at = -math.inf  # a worker that is gone may have been replaced
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
            except BadAnswer as error:  # a server that ended in the middle of it, or another server
                raise _Failed(f"{server.url} {error}", down=False) from None
            except ScoreError as error:
                raise type(error)(f"{server.url} {error}") from None
        words = one_line(await _read_by(refusal, content), 300)
        why = f"{server.url} answered {response.status}" + (f": {words}" if words else "")
        if response.status in _BUSY:
            raise _Failed(why, down=True, pause_s=_seconds(response.headers.get("Retry-After", "")))
        raise ScoreError(why)

    async def fetch(self, path: str) -> list[bytes]:
        """Return what the servers have at `path`, of each that has anything there and can be asked now."""

        async def of(server: _Server) -> bytes | None:
            try:
                response, content = await self._exchange(server, "GET", Question(path, b""))
            except (_Failed, ScoreError):
                return None
            return content if response.status == 200 else None

        return [content for content in await asyncio.gather(*map(of, self.servers)) if content is not None]

    async def _exchange(self, server: _Server, method: str, question: Question) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a request, and return the answer with its body. Raises _Failed, or ScoreError for an endless one."""
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
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a proxy of a kind that is not known
            why = one_line(str(error) or type(error).__name__, 300)
            raise _Failed(f"{server.url} cannot be asked{through(proxy)}: {why}", down=True) from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A compressed answer could be of any size, and a redirect would take the token elsewhere. The library's own
            # time-outs (300 s, 30 s to connect) would end attempts before `timeout_s`. A server's cookies are not ours.
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
        """End the connections."""
        if self._session is not None:
            await self._session.close()


async def _read_by(read: Callable[[bytes], T], content: bytes) -> T:
    """Return what `read` makes of a body, however large that is, without holding up the event loop."""
    return read(content) if len(content) <= _READ_HERE else await in_daemon_thread(read, content)


def _split(address: str) -> tuple[str, str | None]:
    """Return the URL of an address, and the token that stands before its host, if one does."""
    url = URL(address)
    return str(url.with_user(None)).rstrip("/"), url.password


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer. ScoreError if it has no end."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            raise ScoreError(f"{response.url} answers with more than {_LARGEST_ANSWER} bytes")
    return bytes(content)


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After`; 0 for a date."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0.0
