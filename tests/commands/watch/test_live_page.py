"""Tests the live page in a browser: it loads, follows a group, changes the run after a question, fits a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.commands.watch.served import Served, loaded, serve
from tests.commands.watch.watch_world import TOKEN
from tests.support.browser import OpenPage, browser, open_page, played, violations, write_clips
from tests.support.made_run import MadeRun
from tests.support.patience import PATIENCE

__all__ = ["browser", "open_page"]
pytestmark = [pytest.mark.slow, pytest.mark.sliced(floor=3)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("runs") / "made-20260101-120000")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("runs") / "made-20260101-120000", TOKEN)


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs") / "made-20260101-120000"
    write_clips(folder)
    yield from serve(folder)


def test_the_page_shows_the_run_and_keeps_no_key_in_its_address(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    assert live.key not in page.url
    assert page.locator("#runs .pill").inner_text() == "running"
    assert "60 of 96" in page.locator("#buffers-now").inner_text()
    assert page.locator("#buffers-now meter").nth(1).evaluate("meter => [meter.value, meter.max]") == [60, 96]
    assert page.locator("#curves canvas, #curves svg").count() > 0
    assert page.locator("#connection").inner_text() == "live"


def test_what_the_run_adds_appears_without_a_reload(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    before = page.locator("#lanes .note").inner_text()
    MadeRun(groups=220, first=200).write(live.folder)
    page.wait_for_function("before => document.querySelector('#lanes .note').textContent !== before", arg=before)


def test_a_group_is_followed_by_its_number_and_by_a_click(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    page.get_by_role("textbox", name="Group number").fill("42")
    page.get_by_role("button", name="Follow group").click()
    way = page.locator(".way")
    page.get_by_role("heading", name="Group 42").wait_for()
    ledger = [json.loads(line) for line in (live.folder / "ledger.jsonl").read_text().splitlines()]
    text = way.inner_text()
    assert "prompt 42" in text and "6 steps by version 3, 4 by 4" in text
    assert f"Mean reward {ledger[42]['reward']:.4g}" in text and "Trained in update 5" in text and "1 call" in text
    way.get_by_role("button", name="Close").click()
    assert way.is_hidden()
    box = page.locator("canvas.lanes").bounding_box()
    assert box is not None
    # Any place that a box is at: the engines are busy there.
    for x in range(200, 800, 40):
        page.mouse.click(box["x"] + x, box["y"] + 22 + 13)
        if way.is_visible():
            break
    assert re.fullmatch(r"Group \d+", way.locator("h4").inner_text())
    page.get_by_role("textbox", name="Group number").fill("999999")
    page.get_by_role("button", name="Follow group").click()
    page.get_by_text("There is no group 999999 here.").wait_for()


def test_the_lanes_are_moved_and_zoomed_with_the_keyboard(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    canvas = page.locator("canvas.lanes")

    changed = "before => document.querySelector('canvas.lanes').toDataURL() !== before"
    canvas.focus()
    for key in ("+", "ArrowLeft", "-", "Home", "End"):
        before = canvas.evaluate("canvas => canvas.toDataURL()")
        page.keyboard.press(key)
        page.wait_for_function(changed, arg=before)


def test_buttons_ask_first_and_what_they_did_is_recorded_and_shown(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    page.get_by_label("Workers of reward").fill("2")
    page.locator("#actions form").filter(has_text="reward").get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    assert "Scale reward from 1 to 2?" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert live.job.workers["reward"] == 1 and not (live.folder / "actions.jsonl").exists()
    page.get_by_label("Workers of reward").fill("2")
    page.locator("#actions form").filter(has_text="reward").get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Scale reward=2").click()
    done = page.locator(".card").filter(has_text="Done from this page")
    done.get_by_text("scale reward=2").wait_for()
    assert live.job.workers["reward"] == 2
    page.get_by_role("button", name="Stop the run").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    done.get_by_role("cell", name="stop", exact=True).wait_for()
    assert live.job.stops == 1
    lines = [json.loads(line) for line in (live.folder / "actions.jsonl").read_text().splitlines()]
    assert [line["action"] for line in lines] == ["scale", "stop"]


def test_without_the_key_of_the_link_the_page_can_only_look(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live, link=live.address)
    assert page.get_by_role("button", name="Stop the run").is_disabled()
    assert "open the link" in page.locator("#actions").inner_text()


def test_a_token_is_asked_for_once_and_opens_the_page_with_its_buttons(browser: object, locked: Served) -> None:
    page = browser.new_context().new_page()  # type: ignore[attr-defined]
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(locked.address)
    page.get_by_label("The token").fill("not the token of this page")
    page.get_by_role("button", name="Look").click()
    page.get_by_text("that is not the token").wait_for()
    page.get_by_label("The token").fill(TOKEN)
    page.get_by_role("button", name="Look").click()
    page.locator("canvas.lanes").wait_for()
    assert page.get_by_role("button", name="Stop the run").is_enabled()
    page.reload()
    page.locator("canvas.lanes").wait_for()
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_the_page_fits_a_phone_and_passes_the_accessibility_check(
    open_page: OpenPage, live: Served, scheme: str
) -> None:
    page = loaded(open_page, live, width=390, scheme=scheme)
    page.get_by_role("textbox", name="Group number").fill("42")
    page.get_by_role("button", name="Follow group").click()
    page.get_by_role("heading", name="Group 42").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert violations(page) == []


def test_films_and_sounds_play_from_the_server(open_page: OpenPage, playing: Served) -> None:
    page = loaded(open_page, playing)
    assert played(page, "a film") == (pytest.approx(1, abs=0.1), 32, 16)
    assert played(page, "a tone") == (pytest.approx(0.5, abs=0.1), 0, 0)
