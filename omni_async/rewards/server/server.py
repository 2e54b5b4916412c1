"""Answers HTTP: decides which clients and requests are allowed, and which status each error gets.

A request is refused as early as possible: by its address and its headers before its body is read, by the body before a
sample reaches a scorer. Handlers wait for room, for a body (`server.read_s` at most) and for scores.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from omni_async.aio.threads import in_daemon_thread
from omni_async.config.redact import one_line
from omni_async.config.section import bytes_of
from omni_async.media import Media
from omni_async.rewards import wire
from omni_async.rewards.failures import place_of, told
from omni_async.rewards.server.connections import send_continue
from omni_async.rewards.server.limits import RateLimit, Refused, Room, client_of
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import NotNow, Scoring
from omni_async.rewards.server.settings import Server
from omni_async.types import Prompt

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_COME_BACK_S = 1
_UNCHARGED = 2**16  # bytes of a body that are read before there is room for all of it
_NARROW = 2**20  # bytes that texts may always take beyond the bytes of their body
# Fractions of `server.read_s`: how far a body may lag behind, and how far while others wait for its place.
_LAG, _SHORT_LAG = 1 / 6, 1 / 30
_DECODED_HERE = 2**16  # bytes of a body that is decoded on the event loop; a larger one is decoded in a thread
_DECODED_AT_ONCE = 4
_VALUE_BYTES = 64  # memory that a value of metadata takes in addition to its content

Samples = list[tuple[str | None, Media, Prompt]]


class RewardApp:
    """The routes of a server.

    POST /v1/score, GET /metrics (both with the token), GET /health (without)."""

    def __init__(
        self, server: Server, token: str | None, scoring: Scoring, metrics: Metrics, tell: Callable[[str], None]
    ) -> None:
        self._server = server
        self._token = None if token is None else f"Bearer {token}".encode()
        self._scoring = scoring
        self._metrics = metrics
        self._tell = tell
        self._rate = RateLimit(server.requests_per_s, server.burst)
        self._strangers = RateLimit(server.requests_per_s, server.burst)  # requests without the token
        self._largest = bytes_of(server.max_request)
        self._room = Room(bytes_of(server.max_held))
        self._room.began_to_wait = self._hurry
        self._reading: dict[asyncio.Timeout, Callable[[], float]] = {}  # until when each body must have more
        self._decoding = asyncio.Semaphore(_DECODED_AT_ONCE)
        self.ending = False
        metrics.held.set_function(lambda: self._room.held)

    def app(self) -> web.Application:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded], client_max_size=self._largest)
        app.router.add_post(wire.PATH, self._score)
        app.router.add_get("/health", self._health, allow_head=False)
        app.router.add_get("/metrics", self._metrics_text, allow_head=False)
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert every failure of a request into a status and one line, and count it."""
        began = time.monotonic()
        try:
            self._require_allowed(request, began)
            response = await handler(request)
        except Refused as refused:
            response = _refusal(request, refused.status, str(refused))
            if refused.retry_s is not None:
                response.headers["Retry-After"] = str(max(1, math.ceil(refused.retry_s)))
        except web.HTTPException as error:  # no such path, or not this method
            response = _refusal(request, error.status, error.reason)
        except (web.RequestPayloadError, ConnectionError) as error:
            response = _refusal(request, 400, f"the body did not arrive: {one_line(str(error), 200)}")
        except Exception as error:  # noqa: BLE001 (a mistake of ours, of which aiohttp's log shows nothing here)
            self._tell(f"warning: a request failed: {told(error)}{place_of(error)}")
            response = _refusal(request, 500, "the server failed; its own messages say how")
        self._metrics.requests.labels(str(response.status)).inc()
        self._metrics.request_s.observe(time.monotonic() - began)
        return response

    def _require_allowed(self, request: web.Request, now: float) -> None:
        if request.path == "/health":  # probes pass even from an address over its rate
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        is_known = self._token is None or hmac.compare_digest(given, self._token)
        if wait_s := (self._rate if is_known else self._strangers).wait_s(client_of(request.remote), now):
            raise Refused(429, "too many requests", wait_s)
        if not is_known:
            raise Refused(401, "a token is needed: Authorization: Bearer ...")

    async def _score(self, request: web.Request) -> web.Response:
        if request.content_type not in (wire.MSGPACK, wire.JSON):
            raise Refused(415, f"expected Content-Type {wire.MSGPACK} or {wire.JSON}")
        if "Content-Encoding" in request.headers:
            raise Refused(415, "expected a body without Content-Encoding")
        length = request.content_length
        if length is None:
            raise Refused(411, "expected a Content-Length")
        if length > self._largest:
            raise Refused(413, f"the body has {length} bytes, at most {self._largest} are read")
        if self.ending:
            raise Refused(503, "the server is ending", _COME_BACK_S)
        if reason := self._scoring.down:
            raise Refused(503, reason, _COME_BACK_S)
        client, body = client_of(request.remote), bytearray()
        await send_continue(request)
        await self._read(request, body, length, min(length, _UNCHARGED))
        if length <= _UNCHARGED:  # it has arrived, so waiting would gain nothing
            self._room.charge(client, length)
        else:
            # A closed connection is not counted any more, but its request may still wait.
            if self._room.waiting(client) >= max(1, self._server.max_connections // 2):
                raise Refused(503, "too many requests of this client wait", _COME_BACK_S)
            await self._room.take(client, length)
        try:
            await self._read(request, body, length, length, holder=client)
            return await self._answer(client, body, request.content_type)
        finally:
            self._room.give_back(client, length)

    async def _read(
        self, request: web.Request, body: bytearray, length: int, end: int, holder: str | None = None
    ) -> None:
        """Read a body of `length` bytes up to `end`. Raises Refused if it is too slow, see `server.read_s`.

        holder: the client that has room for it."""
        longest, now = self._server.read_s, asyncio.get_running_loop().time
        began = now()

        def due() -> float:
            lag = _SHORT_LAG if holder is not None and self._room.blocks(holder) else _LAG
            return began + longest * min(1.0, lag + len(body) / max(length, 1))

        limit = asyncio.timeout_at(due())
        try:
            async with limit:
                self._reading[limit] = due
                # `request.read` would keep a second copy
                while len(body) < end and (chunk := await request.content.readany()):
                    body += chunk
                    limit.reschedule(due())
        except TimeoutError:
            found = f"{len(body)} of {length} bytes came in {now() - began:.3g} s"
            raise Refused(408, f"the body did not arrive within {longest:g} s at its pace: {found}") from None
        finally:
            self._reading.pop(limit, None)

    def _hurry(self) -> None:
        """Let stalled bodies lose their places to another that waits."""
        for limit, due in self._reading.items():
            if not limit.expired():
                limit.reschedule(due())

    async def _answer(self, client: str, body: bytearray, form: str) -> web.Response:
        if len(body) <= _DECODED_HERE:
            wider = 0
            samples, values = self._samples(body, form)
        else:
            async with self._decoding:
                wider = await in_daemon_thread(self._widening, body, form)
                if wider > _NARROW and not self._room.fits_more(client, wider):
                    raise Refused(503, "there is no room for the texts of this request", _COME_BACK_S)
                self._room.charge(client, wider)
                try:
                    samples, values = await in_daemon_thread(self._samples, body, form)
                except BaseException:
                    self._room.give_back(client, wider)
                    raise
        more = wider + values * _VALUE_BYTES
        body.clear()
        self._room.charge(client, values * _VALUE_BYTES)
        try:
            outcomes = await self._scoring.score(samples, client)
        except NotNow as error:
            raise Refused(503, str(error), _COME_BACK_S) from None
        finally:
            self._room.give_back(client, more)
        return web.Response(body=wire.encode(wire.Answer(1, tuple(outcomes)), form), content_type=form)

    def _widening(self, body: bytearray, form: str) -> int:
        """Return how many bytes the texts of a body may take beyond the body's own. Raises Refused."""
        try:
            return wire.widening(body, form)
        except wire.WireError as error:
            raise Refused(400, str(error)) from None

    def _samples(self, body: bytearray, form: str) -> tuple[Samples, int]:
        """Return the samples of a body, and how many values their metadata have. Raises Refused."""
        try:
            asked = wire.decode_request(body, form)
        except wire.WireError as error:
            raise Refused(400, str(error)) from None
        if (number := len(asked.samples)) > self._server.max_waiting:  # a retry would not help
            raise Refused(413, f"{number} samples in one request, at most {self._server.max_waiting} may wait")
        samples: Samples = []
        for position, sample in enumerate(asked.samples):
            try:
                samples.append((sample.key, *wire.sample_of(sample)))
            except wire.WireError as error:
                raise Refused(400, f"sample {position}: {error}") from None
        return samples, sum(wire.num_values(prompt.metadata) for _, _, prompt in samples)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 if samples are scored now. Only the log and clients with the token get the reason."""
        well = not self.ending and not self._scoring.down
        return web.json_response({"status": "ok" if well else "down"}, status=200 if well else 503)

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _refusal(request: web.Request, status: int, why: str) -> web.Response:
    form = wire.MSGPACK if request.content_type == wire.MSGPACK else wire.JSON
    return web.Response(status=status, body=wire.encode(wire.Refusal(why), form), content_type=form)
