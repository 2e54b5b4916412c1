"""A server with scripted answers and faults, such as OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[Any, int], Any]


def completion(text: str = "7", *tops: tuple[str, float], finish: str = "stop") -> dict[str, Any]:
    """Makes the body of an answer; `tops` are the candidates for the first token with their probabilities."""
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if tops:
        content = [{"token": tops[0][0], "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in tops]}]
        choice["logprobs"] = {"content": content}
    return {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 2}}


class JudgeServer:
    """Answers question n, from 1, with `answer(its body, n)`: a body, (status, body), (status, body, headers), bytes,
    or an awaitable of one of them. A body of JSON is decoded. `models` is what `/v1/models` has, None: there is no such
    thing. An answer ends `cut` bytes early."""

    def __init__(self, answer: Answer, cut: int = 0) -> None:
        self.answer, self.cut = answer, cut
        self.models: dict[str, Any] | None = None
        self.asked: list[Any] = []
        self.headers: list[Any] = []
        self.running = self.most = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_json = request.content_type == "application/json"
        self.asked.append(await request.json() if is_json else await request.read())
        self.headers.append(request.headers)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            found = self.answer(self.asked[-1], len(self.asked))
            found = await found if asyncio.iscoroutine(found) else found
        finally:
            self.running -= 1
        status, body, *more = found if isinstance(found, tuple) else (200, found)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json", "Set-Cookie": "session=1"} | (more[0] if more else {})
        if not self.cut:
            return web.Response(status=status, body=content, headers=head)
        response = web.StreamResponse(status=status, headers=head | {"Content-Length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: -self.cut])
        assert request.transport is not None
        request.transport.close()
        return response

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404) if self.models is None else web.json_response(self.models)


@contextlib.asynccontextmanager
async def judging(answer: Answer, cut: int = 0) -> AsyncIterator[JudgeServer]:
    server = JudgeServer(answer, cut)
    app = web.Application(client_max_size=2**27)
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
