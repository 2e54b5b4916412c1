"""Runs reward servers: real ones on loopback, in a thread of this process or as the command, and wrong ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from omni_async.rewards.scorers.http import HttpScorer
from omni_async.rewards.server.serve import serving
from omni_async.rewards.server.settings import load_server
from omni_async.types import Prompt, Score
from tests.support.images import as_media
from tests.support.moved_clock import MovedLoop
from tests.support.patience import PATIENCE, wait_for
from tests.support.places import ROOT

T = TypeVar("T")
MEDIA = [as_media(np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)) for i in range(4)]
PROMPTS = [Prompt(i, f"prompt {i}", metadata={"colour": "red"}) for i in range(4)]


class Recorder:
    """A scorer that remembers its batches; the value is the mean of the image. `pause_s` is each batch's time."""

    name, accepts = "recorder", ("image",)
    batches: list[list[str]] = []  # noqa: RUF012 (of the class: the server builds the scorer)
    error: BaseException | None = None

    def __init__(self, *, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        type(self).batches = []
        type(self).error = None

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        if self.error is not None:
            raise self.error
        type(self).batches.append([prompt.text for prompt in prompts])
        time.sleep(self._pause_s)
        return [Score(float(one.image.mean()), {"n": float(one.image.size)}, "read") for one in media]


class Held(Recorder):
    """A scorer that sets `begun` and then waits for `free`."""

    begun, free = threading.Event(), threading.Event()

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        self.begun.set()
        self.free.wait(PATIENCE)
        return super().score(media, prompts)


class HeldByFile(Recorder):
    """A scorer in another process: it makes the file `begun` in its folder and then waits for the file `free`."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        (self._folder / "begun").touch()
        wait_for((self._folder / "free").exists, "the release of the scorer")
        return super().score(media, prompts)


class Hanging(Recorder):
    """A scorer that never returns."""

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        threading.Event().wait()
        raise AssertionError


class OnDevice(Recorder):
    """A scorer that is told where to put its model."""

    def __init__(self, *, device: str) -> None:
        super().__init__()


HELD = {"name": f"{__name__}:Held"}
RECORDER = {"name": f"{__name__}:Recorder"}


def write_scorers(folder: Path, *scorers: dict[str, Any], reward: Any = None, **server: Any) -> Path:
    path = folder / "scorers.yaml"
    reward = {"scorers": [*scorers] or [RECORDER]} | (reward or {})
    path.write_text(yaml.safe_dump({"server": {"port": 0} | server, "reward": reward}))
    return path


@contextlib.contextmanager
def served(path: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Serves the file's scorers on a thread of this process; yields the address."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    found: list[Any] = []
    end = asyncio.Event()

    async def main() -> None:
        async with serving(load_server(path), tell) as (address, _):
            found.append(address)
            ready.set()
            await end.wait()

    def run() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE)
        loop.close()


@contextlib.contextmanager
def command(path: Path, *overrides: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts `omni-async serve-reward`; yields the process and its address."""
    words = [sys.executable, "-m", "omni_async.cli", "serve-reward", str(path), *overrides]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | environment, **pipes)
    try:
        assert process.stdout is not None and select.select([process.stdout], [], [], PATIENCE)[0]
        yield process, process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds what `Held` scores until the end."""
    Held.begun.clear()
    Held.free.clear()
    try:
        yield
    finally:
        Held.free.set()


class Asking:
    """The scorer `http` on an event loop of its own, whose clock can be moved, for tests that block."""

    def __init__(self, **params: Any) -> None:
        self.loop = MovedLoop()
        self.scorer = HttpScorer(**params)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        return self.wait_for(self.scorer.score(media, prompts))


@contextlib.contextmanager
def asking(*urls: str, **params: Any) -> Iterator[Asking]:
    client = Asking(urls=urls, **{"backoff_s": 0.01, "backoff_max_s": 0.05} | params)
    try:
        yield client
    finally:
        client.wait_for(client.scorer.close())
        client.loop.call_soon_threadsafe(client.loop.stop)


@contextlib.contextmanager
def answering(answer: Callable[[int], tuple[int, bytes]], *, cut: int = 0) -> Iterator[tuple[str, list[bytes]]]:
    """Serves what `answer(number of the request, from 1)` says, less the last `cut` bytes; yields URL and bodies."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(len(bodies))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body[: len(body) - cut])
            self.close_connection = bool(cut)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
