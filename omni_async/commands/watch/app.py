"""Answers the browser: the page and its files, windows of the timeline, one group, live news, and buttons.

A request can reach a file only by a name listed here, or by a run's name for a sample; no path of a request is ever
joined to a folder. Handlers wait for the run (a button) and for news (server-sent events).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import html
import os
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from omni_async.aio.threads import in_daemon_thread
from omni_async.commands.report.file import PAGE
from omni_async.commands.watch.actions import Asked
from omni_async.commands.watch.guard import HEADERS, Guard
from omni_async.commands.watch.live import LiveRun, TooManyViewers
from omni_async.commands.watch.lives import Lives
from omni_async.config.reading import TooLargeError, open_file, require_within
from omni_async.config.redact import one_line, redact_text
from omni_async.records.read.logs import logs_of, read_log
from omni_async.records.write.files import read_foreign
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
from omni_async.rewards.server.connections import send_continue
from omni_async.rewards.server.limits import Refused
from omni_async.types import SHOWN_OF_PROMPT

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_STREAM = {**HEADERS, "Content-Type": "text/event-stream"}
_MEDIA_TYPES = {"png": "image/png", "mp4": "video/mp4", "wav": "audio/wav"}
_SAMPLE = re.compile(r"(train|validation)-\d{6,9}(-\d{2,4}(?:-question)?)?\.(png|mp4|wav)")
_LARGEST = 16 * 1024
_LARGEST_SAMPLE = 2**26  # bytes
_MOST_ROWS = 1000  # of a table of samples
_LONGEST_TEXT = 2000  # characters of a sample that is a text
_MOST_BOXES = 6000
_MOST_COLUMNS, _MOST_LANES, _MOST_SHARES = 8000, 1000, 1_000_000
_MOST_GROUP = 10**9
_WRITE_S = 30.0  # a viewer that takes no data for so long is dropped to make room for another
_OWN_SCRIPTS = ("live.js", "login.js", "folder.js")
_MOST_LINES = 500  # of a log


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"since": "from", "until": "to"}):
    """The query of a window: seconds since the first span, lanes, and the number of columns for shares."""

    since: float
    until: float
    first: int
    last: int
    columns: int

    def __post_init__(self) -> None:
        if not -1e12 < self.since < self.until < 1e12:
            raise ValueError("from must be before to")
        if not 0 <= self.first <= self.last <= self.first + _MOST_LANES:
            raise ValueError("first and last must be lanes")
        if not 1 <= self.columns <= _MOST_COLUMNS:
            raise ValueError("columns must be some thousands at most")
        if (self.last - self.first) * self.columns > _MOST_SHARES:
            raise ValueError(f"lanes times columns must be {_MOST_SHARES:,} at most")


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


class _Row(msgspec.Struct):
    prompt: str
    image: str = ""
    text: str | None = None


class WatchApp:
    """The routes of a page."""

    def __init__(self, lives: Lives, guard: Guard) -> None:
        self._lives = lives
        self._guard = guard
        index = (PAGE / "index.html").read_text(encoding="utf-8")
        self._index = index.replace("<!-- policy -->", "").replace("<!-- boot -->", '<script src="live.js"></script>')
        self._login_page, self._folder_page = (
            f"{self._index.partition('<body>')[0]}<body>\n{(PAGE / name).read_text(encoding='utf-8')}</body>\n</html>\n"
            for name in ("login.html", "folder.html")
        )
        named = re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css))"', index)
        self._assets = {name: PAGE / name for name in (*named, *_OWN_SCRIPTS)}

    def app(self) -> web.Application:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded], client_max_size=_LARGEST)
        gets: Mapping[str, Handler] = {
            "/": self._page,
            "/events": self._events,
            "/api/report": self._report,
            "/api/window": self._window,
            "/api/group/{group:[0-9]{1,9}}": self._group,
            "/api/log/{worker}": self._log,
            "/samples/{name}": self._sample,
            **{f"/{name}": self._asset for name in self._assets},
        }
        prefix = self._lives.prefix
        all_gets = {f"{prefix}{path}": handler for path, handler in gets.items()}
        if not self._lives.is_one:
            assets = {f"/{name}": self._asset for name in self._assets if "/" not in name}
            all_gets |= {"/": self._folder, "/api/runs": self._runs, **assets}
            app.router.add_post("/login", self._login)
        for path, handler in all_gets.items():
            app.router.add_get(path, handler, allow_head=False)
        app.router.add_post(f"{prefix}/login", self._login)
        app.router.add_post(f"{prefix}/api/act", self._act)
        return app

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every failure of a request into a status and one line, with the headers of all answers."""
        try:
            now = time.monotonic()
            has_token = self._guard.knows(request, now)
            self._guard.require_allowed(request, has_token, now)
            rest = self._lives.rest(request.path)
            known = has_token or rest == "login" or rest in self._assets
            if not known and not rest:
                return self._html(self._login_page, 401)
            if not known:
                raise Refused(401, "a token is needed")
            response = await handler(request)
        except Refused as refused:
            response = _refusal(refused.status, str(refused), refused.retry_s)
        except web.HTTPException as error:
            response = _refusal(error.status, error.reason)
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
        except Exception as error:  # noqa: BLE001 (aiohttp's own log is off: strangers can fill it)
            response = _refusal(500, f"{type(error).__name__}: {error}")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    # ---- the page ---------------------------------------------------------------------------------------------------

    def _html(self, text: str, status: int = 200) -> web.Response:
        return web.Response(text=text, status=status, content_type="text/html", charset="utf-8", headers=HEADERS)

    async def _page(self, request: web.Request) -> web.Response:
        run = (await self._lives.of(request)).run.run_id
        return self._html(self._index.replace("<!-- loading -->", f"Loading {html.escape(one_line(run, 200))} ..."))

    async def _folder(self, request: web.Request) -> web.Response:
        return self._html(self._folder_page)

    async def _runs(self, request: web.Request) -> web.Response:
        try:
            return _json(await self._lives.listed())
        except OSError as error:
            raise Refused(500, f"the folder cannot be read: {error.strerror}") from None

    async def _asset(self, request: web.Request) -> web.Response:
        path = self._assets[self._lives.rest(request.path)]
        content = await in_daemon_thread(path.read_bytes)
        return web.Response(body=content, content_type=_TYPES[path.suffix], charset="utf-8")

    async def _login(self, request: web.Request) -> web.Response:
        self._guard.require_own_page(request)
        asked = await _body(request, Login)
        session = self._guard.begin_session(request, asked.token, time.monotonic())
        response = web.json_response({"key": self._guard.key})
        response.set_cookie(self._guard.cookie(request), session, httponly=True, samesite="Strict", path="/")
        return response

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        found = _SAMPLE.fullmatch(name)
        if found is None:
            raise Refused(404, "there is no such sample")
        part, run = _part_of(request), (await self._lives.of(request)).run
        try:
            content, begin, size = await in_daemon_thread(lambda: _sample_of(run, name, part or slice(None)))
        except OSError as error:
            raise Refused(404, f"there is no such sample: {error.strerror}") from None
        headers = {"Accept-Ranges": "bytes"}
        if part is None:
            return web.Response(body=content, content_type=_MEDIA_TYPES[found[3]], headers=headers)
        if not content:
            raise Refused(416, f"the sample has {size} bytes")
        headers["Content-Range"] = f"bytes {begin}-{begin + len(content) - 1}/{size}"
        return web.Response(status=206, body=content, content_type=_MEDIA_TYPES[found[3]], headers=headers)

    # ---- content ----------------------------------------------------------------------------------------------------

    async def _report(self, request: web.Request) -> web.Response:
        return web.Response(body=(await self._lives.of(request)).report, content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response, live = web.StreamResponse(headers=_STREAM), await self._lives.of(request)
        async with contextlib.aclosing(live.messages()) as messages:
            try:
                first = await anext(messages)
            except TooManyViewers:
                raise Refused(503, "too many pages are open", 10.0) from None
            await response.prepare(request)
            with contextlib.suppress(ConnectionError, TimeoutError):
                await _write(response, first)
                async for message in messages:
                    await _write(response, message)
        return response

    async def _window(self, request: web.Request) -> web.Response:
        asked = _query(request, Window)
        spans = (await self._lives.of(request)).follower.spans
        lanes = len(spans.lanes())
        first, last = min(asked.first, lanes), min(asked.last, lanes)
        origin = spans.start
        window = spans.window(origin + asked.since, origin + asked.until, first, last, asked.columns, _MOST_BOXES)
        answer: dict[str, Any] = {"kinds": spans.kinds, "first": first, "last": last}
        if window.boxes is None:
            assert window.busy is not None and window.waits is not None
            answer["busy"] = b64encode(window.busy.tobytes()).decode()
            answer["waits"] = b64encode(window.waits.tobytes()).decode()
        else:
            boxes = window.boxes
            answer["boxes"] = {
                "lane": spans.lanes_of(boxes).tolist(),
                "track": boxes["track"].tolist(),
                "kind": boxes["kind"].tolist(),
                "group": boxes["group"].tolist(),
                "start": (boxes["start"] - origin).round(6).tolist(),
                "end": (boxes["end"] - origin).round(6).tolist(),
            }
        return _json(answer)

    async def _group(self, request: web.Request) -> web.Response:
        group = int(request.match_info["group"])
        live = await self._lives.of(request)
        follower = live.follower
        entry = follower.ledger_line(group) if group < _MOST_GROUP else None
        number = None if entry is None else entry.prompt
        spans = follower.spans_of(group, number)
        if entry is None and not spans:
            return _json(None)  # no error: a reader may try any number
        text = entry.text if entry is not None and entry.text else None
        origin = follower.spans.start
        answer = {
            "group": group,
            "entry": entry,
            "prompt": text,
            "spans": [
                {
                    "lane": lane,
                    "kind": span.kind,
                    "start": round(span.start - origin, 6),
                    "end": round(span.end - origin, 6),
                    "args": span.args,
                }
                for span, lane in spans
            ],
            "media": [] if entry is None or text is None else _media(live, entry.trained_version, text),
        }
        return _json(answer)

    async def _log(self, request: web.Request) -> web.Response:
        """Return the last lines of a worker's log. Needs the key: a process may print anything."""
        self._guard.require_key(request)
        run = (await self._lives.of(request)).run
        path = logs_of(run).get(request.match_info["worker"])
        if path is None:
            raise Refused(404, "there is no such log")
        try:
            found = await in_daemon_thread(read_log, path, run.path)
        except OSError as error:
            raise Refused(404, f"the log cannot be read: {error.strerror}") from None
        return _json(found.lines[-_MOST_LINES:])

    # ---- buttons ----------------------------------------------------------------------------------------------------

    async def _act(self, request: web.Request) -> web.Response:
        self._guard.require_own_page(request)
        self._guard.require_key(request)
        asked = await _body(request, Asked)
        try:
            action = await (await self._lives.of(request)).actions.do(asked, request.remote or "")
        except RunDirectoryError as error:
            raise Refused(500, f"it was done, and could not be recorded: {error}") from None
        return _json({"result": action.result})


async def _write(response: web.StreamResponse, message: bytes) -> None:
    """Write a server-sent event, or a beat. TimeoutError if the viewer does not accept it."""
    async with asyncio.timeout(_WRITE_S):
        await response.write(b"data: " + message + b"\n\n" if message else b": beat\n\n")


def _part_of(request: web.Request) -> slice | None:
    """Return the one range of bytes that a player requests; None for the whole file."""
    if "Range" not in request.headers or "If-Range" in request.headers:
        return None
    try:
        return request.http_range
    except ValueError:  # another unit, or several ranges
        return None


def _media(live: LiveRun, version: int | None, prompt: str) -> list[dict[str, str]]:
    """Return the samples of a prompt that its update showed, if any. `prompt`: the beginning of its text."""
    run = live.run
    if version is None or ("train", version) not in live.follower.samples:
        return []
    rows, _ = read_foreign(run.samples / f"train-{version:06d}.jsonl", _Row, run.path, most=_MOST_ROWS)
    own = [row for row in rows if row.prompt[:SHOWN_OF_PROMPT] == prompt]
    return [
        {"src": f"samples/{row.image}"} if _SAMPLE.fullmatch(row.image) else {"text": str(row.text)[:_LONGEST_TEXT]}
        for row in own
        if _SAMPLE.fullmatch(row.image) or row.text is not None
    ]


def _sample_of(run: RunDirectory, name: str, part: slice) -> tuple[bytes, int, int]:
    """Read a part of a file of the samples folder; return it with its offset and the file's size, in bytes.

    Raises OSError; OutsideError if the file or the folder is a link to a place outside its folder."""
    require_within(run.samples, run.path)
    with open_file(run.samples / name, within=run.samples) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_SAMPLE:
            raise TooLargeError(errno.EFBIG, f"larger than {_LARGEST_SAMPLE} bytes", name)
        begin, end, _ = part.indices(size)
        file.seek(begin)
        return file.read(max(0, end - begin)), begin, size


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        async with asyncio.timeout(10.0):
            await send_continue(request)
            content = await request.read()
    except TimeoutError:
        raise Refused(408, "the body did not arrive") from None
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"a body has {_LARGEST} bytes at most") from None
    try:
        return msgspec.json.decode(content, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, str(error)) from None


def _query(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise Refused(400, str(error)) from None


def _json(answer: Any) -> web.Response:
    response = web.Response(body=msgspec.json.encode(answer, enc_hook=str), content_type="application/json")
    response.enable_compression()
    return response


def _refusal(status: int, why: str, retry_s: float | None = None) -> web.Response:
    headers = {} if retry_s is None else {"Retry-After": str(max(1, round(retry_s)))}
    text = one_line(redact_text(why))
    return web.Response(
        body=msgspec.json.encode({"error": text}), status=status, content_type="application/json", headers=headers
    )
