"""Asks reward servers: `omni-async serve-reward`, or anything that speaks the protocol of `docs/rewards/http.md`.

Owns an event loop in a thread, with a pool of connections; `score` waits there for the answer, `retries` + 1 times
`timeout_s` and the pauses between at most. An answer, a time-out or a lost connection unblocks it.

A request goes to the server that has the fewest of ours; one that failed is asked last for `timeout_s`. What is not
answered, or answered by a server that says it is busy, is asked again after a pause, which doubles and varies at random
so that clients do not return together; another server, if there is one. What a server refuses as wrong is not sent
again. A sample's key is made of its content, so that a server which has scored it already can answer a repeated request
from memory.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

import aiohttp
import msgspec
import xxhash
from msgspec import Meta

from omni_async.aio.backoff import Backoff
from omni_async.aio.waiting import cancel
from omni_async.config.redact import one_line, redact_text
from omni_async.media import Media
from omni_async.rewards import wire
from omni_async.rewards.base import Outage, ScoreError, Unbounded
from omni_async.types import Prompt, Score

# No user and password, no query: a token goes into a header, where nothing logs it.
Url = Annotated[str, Meta(pattern=r"^https?://[\w.\-\[\]:]+(/[\w.~/-]*)?\Z")]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]

_LARGEST_ANSWER = 2**26
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Failed(Exception):
    """An attempt failed, and another may not. `down`: nothing answered, or a server said that it cannot now."""

    def __init__(self, why: str, *, down: bool, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.down = down
        self.pause_s = pause_s


@dataclass(eq=False)
class _Server:
    """A server, the requests that it has of ours, and when it failed, if it has not answered since."""

    url: str
    running: int = 0
    failed_at: float = -math.inf


@dataclass
class _Client:
    """The event loop's side: everything here runs on its thread."""

    servers: list[_Server]
    headers: dict[str, str]
    form: str
    timeout_s: float
    hedge_s: float | None
    retries: int
    pauses: Backoff
    connections: int
    jitter: random.Random = field(default_factory=random.Random)
    session: aiohttp.ClientSession | None = None

    async def ask(self, body: bytes, num_samples: int) -> wire.Answer:
        tried: list[_Server] = []
        while True:
            try:
                return await self._hedged(body, num_samples, tried)
            except _Failed as error:
                if len(tried) > self.retries:
                    kind = Outage if error.down else ScoreError
                    raise kind(f"{error} (asked {len(tried)} times)" if len(tried) > 1 else str(error)) from None
                longest = self.pauses.pause_s(len(tried))
                pause_s = max(self.jitter.uniform(longest / 2, longest), min(error.pause_s, self.pauses.longest_s))
            await asyncio.sleep(pause_s)

    def _next(self, busy: Sequence[_Server]) -> _Server:
        """Return the server to ask: not one of `busy` if others are left, none that failed lately, the least loaded."""
        since = asyncio.get_running_loop().time() - self.timeout_s

        def order(one: _Server) -> tuple[bool, bool, int, float]:
            return one in busy, one.failed_at > since, one.running, self.jitter.random()

        return min(self.servers, key=order)

    async def _hedged(self, body: bytes, num_samples: int, tried: list[_Server]) -> wire.Answer:
        """Return the first answer: of one server, or also of a second one if that takes longer than `hedge_s`."""
        first = self._next(tried[-1:])
        tried.append(first)
        calls = {asyncio.create_task(self._attempt(first, body, num_samples))}
        try:
            done, _ = await asyncio.wait(calls, timeout=self.hedge_s)
            if not done:
                calls.add(asyncio.create_task(self._attempt(self._next([first]), body, num_samples)))
            running: set[asyncio.Task[wire.Answer]] = calls
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                errors = [call.exception() for call in done]
                for call, error in zip(done, errors, strict=True):
                    if error is None:
                        return call.result()
                if not running:
                    raise next(error for error in errors if error is not None)
        finally:
            await cancel(calls)

    async def _attempt(self, server: _Server, body: bytes, num_samples: int) -> wire.Answer:
        server.running += 1
        try:
            answer = await self._post(server, body)
        except _Failed:
            server.failed_at = asyncio.get_running_loop().time()
            raise
        finally:
            server.running -= 1
        server.failed_at = -math.inf
        if len(answer.scores) != num_samples:
            raise ScoreError(f"{server.url} answered with {len(answer.scores)} scores for {num_samples} samples")
        return answer

    async def _post(self, server: _Server, body: bytes) -> wire.Answer:
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=self.connections)
            # A compressed answer could be of any size, and a redirect would take the token elsewhere. The library's own
            # time-outs (300 s, 30 s to connect) would end attempts before `timeout_s`.
            self.session = aiohttp.ClientSession(
                connector=connector,
                headers=self.headers,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(),
            )
        try:
            async with asyncio.timeout(self.timeout_s):
                url = server.url.rstrip("/") + wire.PATH
                async with self.session.post(url, data=body, allow_redirects=False) as response:
                    content = await _read(response)
        except TimeoutError:
            raise _Failed(f"{server.url} did not answer within {self.timeout_s:g} s", down=True) from None
        except (aiohttp.ClientError, OSError) as error:
            why = one_line(str(error) or type(error).__name__, 300)
            raise _Failed(f"{server.url} cannot be asked: {why}", down=True) from None
        if response.status == 200:
            return self._decoded(server, content)
        refusal = one_line(wire.decode_refusal(content, self.form), 300)
        why = f"{server.url} answered {response.status}" + (f": {refusal}" if refusal else "")
        if response.status in _BUSY:
            raise _Failed(why, down=True, pause_s=_seconds(response.headers.get("Retry-After", "")))
        raise ScoreError(why)

    def _decoded(self, server: _Server, content: bytes) -> wire.Answer:
        try:
            return wire.decode_answer(content, self.form)
        except wire.WireError as error:  # a server that ended in the middle of it, or no reward server at all
            raise _Failed(f"{server.url} sent no answer of the protocol: {error}", down=False) from None

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
        await cancel([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            raise ScoreError(f"{response.url} answers with more than {_LARGEST_ANSWER} bytes")
    return bytes(content)


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After`; 0 for a date, which servers of this protocol do not send."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0.0


class HttpScorer:
    """A scorer whose value, parts and text are those that a server answers.

    `urls`: servers that score alike; `token` is sent to each of them. `timeout_s`: longest that one attempt may take.
    `hedge_s`: after so long a second server is asked, too, and the first answer counts; null: never. `connections`:
    most that are open at once. `form`: how samples are written."""

    name = "http"
    accepts = ("image", "video", "audio")
    concurrent = True

    def __init__(
        self,
        *,
        urls: Annotated[tuple[Url, ...], Meta(min_length=1, max_length=100)],
        token: str | None = None,
        timeout_s: Seconds = 15.0,
        hedge_s: Seconds | None = None,
        retries: Annotated[int, Meta(ge=0, le=100)] = 2,
        backoff_s: Seconds = 0.5,
        backoff_max_s: Seconds = 10.0,
        connections: Annotated[int, Meta(ge=1, le=10_000)] = 64,
        form: Literal["msgpack", "json"] = "msgpack",
    ) -> None:
        self._form = wire.MSGPACK if form == "msgpack" else wire.JSON
        headers = {"Content-Type": self._form, "Accept-Encoding": "identity"}
        if token is not None:
            if not token.isprintable() or not token.isascii():
                raise ValueError("token: expected printable ASCII characters")
            headers["Authorization"] = f"Bearer {token}"
        self._client = _Client(
            [_Server(url) for url in urls],
            headers,
            self._form,
            timeout_s,
            hedge_s,
            retries,
            Backoff(backoff_s, backoff_max_s),
            connections,
        )
        # Without it a key would say to whoever may ask the server which samples another client has scored.
        self._salt = secrets.token_bytes(16)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        samples = tuple(self._sample(one, prompt) for one, prompt in zip(media, prompts, strict=True))
        body = wire.encode(wire.Request(1, samples), self._form)
        asking = self._client.ask(body, len(samples))
        answer = asyncio.run_coroutine_threadsafe(asking, self._running_loop()).result()
        failed = [one for one in answer.scores if one.error is not None or one.value is None]
        for outcome in sorted(failed, key=lambda one: one.kind != "outage"):
            kind = {"outage": Outage, "unbounded": Unbounded}.get(outcome.kind, ScoreError)
            raise kind(redact_text(one_line(outcome.error or "the server sent neither a value nor an error", 300)))
        return [Score(one.value, one.parts, one.text) for one in answer.scores if one.value is not None]

    def _sample(self, media: Media, prompt: Prompt) -> wire.WireSample:
        sample = wire.sent_sample(media, prompt, None)
        digest = xxhash.xxh3_128(self._salt)
        digest.update(msgspec.msgpack.encode(sample.prompt))
        for part in media.parts:
            array: wire.Array = getattr(sample.media, part)
            digest.update(msgspec.msgpack.encode((part, array.shape, array.rate)))
            digest.update(array.data)
        return msgspec.structs.replace(sample, key=digest.hexdigest())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="http scorer", daemon=True).start()
            return self._loop

    def close(self) -> None:
        """End the connections and the thread; the end of the process does so, too."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._client.close(), loop).result(timeout=10)
            loop.call_soon_threadsafe(loop.stop)
