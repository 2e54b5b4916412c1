"""Opens pages in the system's Chromium, and requires of each that it says no error and loads nothing from elsewhere.

A browser is a module's: Playwright's event loop is this thread's as long as it is open, so that nothing else of the
module may run one here (`in_a_thread` is for what has to).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest
from PIL import Image

from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.driver.sample_files import sample_row
from omni_async.types import Prompt
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

T = TypeVar("T")
OpenPage = Callable[..., "Page"]

_ARGUMENTS = (
    "--no-sandbox",  # as root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


NO_CHROMIUM = (
    "Chromium is not installed: tests of pages are skipped; apt-get install chromium-headless-shell (Debian) runs them"
)
# The headless shell has no windows and panels of a desktop browser, whose own pages take half of the processor's time.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of the system's Chromium, under any of the names that distributions give it."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip(NO_CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, headless=True, args=[*_ARGUMENTS])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(url, width=1280, scheme="light", own="file:")` -> the page, loaded.

    The test fails if a page of it wrote an error to the console, raised one, or asked for anything but addresses that
    begin with `own` and what it holds itself."""
    contexts, problems = [], list[str]()

    def opened(url: str, width: int = 1280, scheme: Literal["light", "dark"] = "light", own: str = "file:") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_default_timeout(1000 * PATIENCE)
        contexts.append(context)

        def on_console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                problems.append(f"console {message.type}: {message.text}")

        def on_request(request: Request) -> None:
            if not request.url.startswith((own, "data:", "blob:")):
                problems.append(f"request: {request.url}")

        page = context.new_page()
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", on_request)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems, problems


def violations(page: Page) -> list[str]:
    """Return what axe objects to, a line per rule with the first element that breaks it."""
    from axe_playwright_python.sync_playwright import Axe

    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {rule['help']}: {rule['nodes'][0]['html'][:300]}" for rule in found]


# Of a video or audio element: what it plays, once it plays.
_PLAYED = """async medium => {
  await new Promise((loaded, failed) => {
    medium.onloadeddata = loaded;
    medium.onerror = () => failed(new Error(medium.error.message));
    medium.load();
  });
  medium.muted = true;
  await medium.play();
  await new Promise((moved) => { medium.ontimeupdate = () => medium.currentTime > 0 && moved(); });
  return [medium.duration, medium.videoWidth ?? 0, medium.videoHeight ?? 0];
}"""


def played(page: Page, prompt: str) -> tuple[float, int, int]:
    """Play the newest sample of a prompt; return its seconds, width and height. Fails if the browser cannot play it."""
    medium = page.locator(".strip", has_text=prompt).locator("video, audio").last
    seconds, width, height = medium.evaluate(_PLAYED)
    return seconds, width, height


def write_clips(folder: Path) -> None:
    """Write the samples of two validation rounds: `a film`, 1 s of 32 x 16 with sound, and `a tone` of 0.5 s."""
    folder.mkdir(exist_ok=True)
    run = RunDirectory(folder)
    run.samples.mkdir(exist_ok=True)
    run.config_yaml.touch()
    noise = np.random.default_rng(0)
    tone = (0.1 * np.sin(np.arange(8000) / 5)).astype(np.float32)[None].repeat(2, axis=0)
    film = noise.integers(0, 256, (8, 3, 16, 32), dtype=np.uint8)
    media = {
        "a film": Media(video=film, fps=8.0, audio=np.tile(tone, 2), sample_rate=16_000),
        "a tone": Media(audio=tone, sample_rate=16_000),
    }
    for version in (0, 20):
        name = f"validation-{version:06d}"
        rows = [
            sample_row(Prompt(number, prompt), one, write_media(one, run.samples / f"{name}-{number:02d}"))
            for number, (prompt, one) in enumerate(media.items())
        ]
        (run.samples / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
        Image.new("RGB", (8, 8)).save(run.samples / f"{name}.png")


def in_a_thread(work: Callable[[], T]) -> T:
    """Call `work` in another thread and return its result: it may have an event loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
