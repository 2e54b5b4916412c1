"""Serves live pages from a thread, for tests of them in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.commands.watch.serve import serving
from tests.commands.watch.watch_world import RunningJob
from tests.support.browser import OpenPage
from tests.support.made_run import MadeRun
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Page


@dataclass
class Served:
    """A live page, of a run that answers or, with `is_one` false, of the folder that it is in."""

    folder: Path
    job: RunningJob
    is_one: bool = True
    address: str = ""
    key: str = ""

    @property
    def link(self) -> str:
        return f"{self.address}/#{self.key}"


def serve(folder: Path, token: str | None = None, is_one: bool = True) -> Iterator[Served]:
    made = MadeRun(groups=200)
    made.write(folder)
    (folder / "config.yaml").write_text("run: {name: made}\n")
    served = Served(folder, RunningJob(folder), is_one)
    ready, loop, ended = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    shown = folder if is_one else folder.parent

    async def main() -> None:
        pages = serving(shown, "127.0.0.1", 0, token, is_one)
        async with served.job.answering(), pages as (served.address, served.key):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(PATIENCE)
    with contextlib.closing(loop):
        yield served
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def loaded(open_page: OpenPage, served: Served, width: int = 1280, scheme: str = "light", link: str = "") -> Page:
    """Opens the page of a run and waits for its timeline and its report."""
    page = open_page(link or served.link, width=width, scheme=scheme, own=served.address)
    page.locator("canvas.lanes").wait_for()
    page.locator("#verdict").wait_for()
    return page
