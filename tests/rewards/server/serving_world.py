"""Runs reward servers on loopback, in a thread of this process or as the command, and asks them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import yaml

from omni_async.rewards import wire
from omni_async.rewards.scorers.http import HttpScorer
from omni_async.rewards.server.serve import serving
from omni_async.rewards.server.settings import load_server
from omni_async.types import Prompt, Score
from tests.support.images import as_media
from tests.support.patience import PATIENCE, wait_for
from tests.support.places import ROOT

MEDIA = [as_media(np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)) for i in range(4)]
PROMPTS = [Prompt(i, f"prompt {i}", metadata={"colour": "red"}) for i in range(4)]
TOKEN = "a token of the tests"


class Recorder:
    """A scorer that remembers its batches; the value is the mean of the image."""

    name, accepts = "recorder", ("image",)
    batches: list[list[str]] = []  # noqa: RUF012 (of the class: the server builds the scorer)
    error: BaseException | None = None

    def __init__(self) -> None:
        type(self).batches, type(self).error = [], None

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        if self.error is not None:
            raise self.error
        type(self).batches.append([prompt.text for prompt in prompts])
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
def served(path, tell=lambda text: None):
    """Serves the file's scorers on a thread of this process; yields the address."""
    ready, end = Future(), asyncio.Event()

    async def main():
        try:
            async with serving(load_server(path), tell) as (address, _):
                ready.set_result((address, asyncio.get_running_loop()))
                await end.wait()
        except BaseException as error:
            ready.done() or ready.set_exception(error)
            raise

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    address, loop = ready.result(PATIENCE)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(PATIENCE)


@contextlib.contextmanager
def command(path, **environment):
    """Starts `omni-async serve-reward`; yields the process and its address."""
    words = [sys.executable, "-m", "omni_async.cli", "serve-reward", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | environment, **pipes)
    try:
        assert select.select([process.stdout], [], [], PATIENCE)[0]
        yield process, process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def held():
    """Holds what `Held` scores until the end."""
    Held.begun.clear()
    Held.free.clear()
    try:
        yield
    finally:
        Held.free.set()


@contextlib.contextmanager
def asking(*urls, **params):
    """Yields a blocking `score` of the scorer `http`."""
    scorer = HttpScorer(urls=urls, **{"backoff_s": 0.01, "backoff_max_s": 0.05} | params)
    with asyncio.Runner() as runner:
        try:
            yield lambda media=MEDIA, prompts=PROMPTS: runner.run(scorer.score(media, prompts))
        finally:
            runner.run(scorer.close())


def ask(url, body=b"", method="POST", path=wire.PATH, **headers):
    """Returns status, headers and body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Content-Type": wire.MSGPACK} | headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def measured(url, line):
    """Whether the server's metrics have the line."""
    return f"omni_async_reward_{line}" in ask(url, method="GET", path="/metrics")[2].decode().splitlines()


def request_of(*samples, form=wire.MSGPACK):
    return wire.encode(wire.Request(1, samples), form)


def sample(i=0, key=None):
    return wire.sent_sample(MEDIA[i], PROMPTS[i], key)
