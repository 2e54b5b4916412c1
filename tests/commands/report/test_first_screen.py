"""Tests the first screen of a report and of a comparison in a browser, on a desk and on a phone, light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from omni_async.commands.report.data import page_of
from omni_async.commands.report.file import one_file
from omni_async.records.read.record import read_run
from tests.commands.report.report_world import facts, metrics, written
from tests.support.browser import OpenPage, in_a_thread, violations
from tests.support.places import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.sliced(floor=3)

RECORDED = ROOT / "tests" / "records" / "read" / "recorded" / "full-20261125-210306"
SCREENS = {1400: 900, 390: 844}  # width -> height in pixels
SIZES = [
    *((1400, "light"), (390, "dark")),
    *(pytest.param(*other, marks=pytest.mark.thorough) for other in ((1400, "dark"), (390, "light"))),
]


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of a recorded run of 4 updates, validated before, at and after update 2."""
    return _written(tmp_path_factory.mktemp("one") / "report.html", RECORDED)


@pytest.fixture(scope="session")
def arms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A synchronous and an asynchronous run, validated over the same four prompts."""
    folder, rising = tmp_path_factory.mktemp("arms"), [0.2 + 0.02 * n for n in range(20)]
    before = {0: [0.1, 0.2, 0.2, 0.3], 10: [0.3, 0.4, 0.4, 0.5]}
    sync = {**before, 20: [0.5, 0.6, 0.7, 0.8]}
    other = {**before, 20: [0.6, 0.7, 0.7, 0.8]}
    return (
        written(folder / "sync", rising, 0, sync, name="sync", budget=0, update_s=3.0),
        written(folder / "async", rising, 0, other, name="async", budget=2, update_s=2.0),
    )


@pytest.fixture(scope="session")
def comparison(arms: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return _written(tmp_path_factory.mktemp("two") / "report.html", *arms)


def _written(out: Path, *folders: Path) -> str:
    out.write_text(one_file(in_a_thread(lambda: page_of([read_run(folder) for folder in folders], "now"))))
    return f"file://{out}"


def opened(open_page: OpenPage, address: str, width: int, scheme: Literal["light", "dark"]) -> Page:
    page = open_page(address, width=width, scheme=scheme)
    page.set_viewport_size({"width": width, "height": SCREENS[width]})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    return page


def is_on_screen(part: Locator, width: int) -> bool:
    """Return whether the whole of a part is visible without scrolling."""
    box = part.bounding_box()
    assert box is not None
    return box["y"] + box["height"] <= SCREENS[width] and box["x"] + box["width"] <= width


def data_of(page: Page) -> dict[str, Any]:
    return json.loads(page.locator("#data").text_content() or "")


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_report_shows_what_the_run_is_and_its_samples_before_and_after(
    report: str, open_page: OpenPage, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = opened(open_page, report, width, scheme)
    shown = page.locator("#verdict .facts")
    assert is_on_screen(page.locator("h1"), width) and is_on_screen(shown, width)
    assert shown.locator("dt").all_inner_texts() == ["algorithm", "model", "reward", "staleness", "bottleneck"]
    values = shown.locator(".value").all_inner_texts()
    assert values[:4] == ["flow_grpo", "qwen_image", "jpeg_size", "S = 2"]
    assert shown.locator(".detail").nth(3).inner_text() == "used: 1.25 on average, 2 at most"
    before, after = (page.locator(".strip").first.locator("img").nth(n) for n in (0, 1))
    assert is_on_screen(before, width) and is_on_screen(after, width)
    assert before.get_attribute("src") != after.get_attribute("src")
    assert not violations(page)


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_comparison_shows_which_recipe_is_faster_and_the_numbers_of_its_data(
    comparison: str, arms: tuple[Path, Path], open_page: OpenPage, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = opened(open_page, comparison, width, scheme)
    verdict = next(section for section in data_of(page)["sections"] if section["id"] == "verdict")
    assert page.locator("h1").inner_text() == verdict["title"]
    cards = page.locator("#verdict .facts").first
    assert is_on_screen(page.locator("h1"), width) and is_on_screen(cards, width)
    compared = facts({**verdict, "tabs": []})
    parts = (cards.locator(part).all_inner_texts() for part in ("dt", ".value", ".detail"))
    assert {label: (value, detail) for label, value, detail in zip(*parts, strict=True)} == compared
    rounds = [[line["validation/reward"] for line in metrics(arm) if "validation/reward" in line] for arm in arms]
    assert [each[-1] for each in rounds] == pytest.approx([0.65, 0.7])
    # The asynchronous run rises from 0.4 at 20 s to 0.7 at 40 s.
    assert compared["seconds to validation reward 0.650"][0] == "60.0 → 36.7"
    assert compared["seconds per update"][0] == "3.00 → 2.00"
    assert compared["validation reward after update 20"][0] == "0.650 → 0.700"
    assert verdict["title"] == "async is 1.64 times as fast: validation reward 0.650 after 36.7 s instead of 60.0 s"
    assert not violations(page)


def test_details_are_closed_until_asked_for_and_the_page_is_less_than_half_as_long(
    report: str, open_page: OpenPage
) -> None:
    page = opened(open_page, report, 1400, "light")
    height = "document.documentElement.scrollHeight"
    closed = page.evaluate(height)
    page.get_by_role("button", name="Open all").click()
    page.locator("#chart-metric-update_s canvas").wait_for()
    assert page.evaluate(height) > 2 * closed
    page.get_by_role("button", name="Close all").click()
    assert page.evaluate(height) == closed


def test_a_link_to_a_folded_section_opens_it(report: str, open_page: OpenPage) -> None:
    page = opened(open_page, report, 1400, "light")
    assert page.locator("#staleness .brief").inner_text().startswith("1.25 updates on average, 2 at most")
    page.locator("#contents").get_by_role("link", name="Staleness").click()
    page.locator("#chart-staleness canvas").wait_for()
    page = opened(open_page, f"{report}#buffers", 1400, "light")
    page.locator("#buffers figure.chart canvas").first.wait_for()


def test_without_javascript_a_page_names_what_it_needs(report: str, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report)
    needs = page.locator("noscript p")
    assert needs.is_visible() and needs.inner_text() == "This page needs JavaScript, which is switched off here."
    assert not page.locator("#loading").is_visible()
    context.close()
