"""Tests the documentation as a site: pages, links, search, and that nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.support.browser import OpenPage
from tests.support.places import ROOT


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site's address, as `make site` makes it: a warning, of a link that leads nowhere say, is a failure."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def named(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from named(entry) if isinstance(entry, list | dict) else [entry]


def test_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [*named(yaml.safe_load(text[text.index("nav:\n  - Home") :])["nav"])]
    own = sorted(page for page in pages if not page.startswith("repository/"))
    assert own == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    assert all((ROOT / page.removeprefix("repository/")).is_file() for page in pages if page not in own)


@pytest.mark.slow
@pytest.mark.thorough
def test_front_page(site: str, open_page: OpenPage) -> None:
    for width in (390, 1280):
        page = open_page(site, width=width, own=site)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("article img").evaluate("image => image.naturalWidth") > 0
        assert page.locator(".home li").count() > 20
    page.click("text=Which recipe, which algorithm, which S")
    assert page.title().startswith("Which recipe, algorithm, S")
    page.click("article >> text=qwen_image_ocr")
    assert page.locator("h1").inner_text().startswith("Recipes")
    page.click("article >> text=Qwen-Image OCR >> nth=0")  # a file of the repository, which is listed
    assert "# Source: verl-project/verl-omni" in page.locator("pre").first.inner_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_search(site: str, open_page: OpenPage) -> None:
    page = open_page(site, scheme="dark", own=site)
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    field = page.locator("input.md-search__input")
    field.focus()
    page.get_by_text("Type to start searching").wait_for()  # a query before the index is there is an error
    # By keys, which the page listens to: what is put there at once is seen only if it comes before the focus is.
    field.press_sequentially("reward_in_turn backpressured")
    found = page.locator(".md-search-result__link >> text=What a run leaves behind").first
    found.wait_for()
