"""Tests in a browser what a live page shows first, its logs, and the page of a folder of runs, on desk and phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.commands.watch.served import Served, loaded, serve
from tests.support.browser import OpenPage, browser, open_page, violations
from tests.support.made_run import MadeRun
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

__all__ = ["browser", "open_page"]
pytestmark = [pytest.mark.slow, pytest.mark.sliced(floor=4)]
_HEIGHTS = {1400: 900, 390: 844}  # of screens, by their width, in pixels
on_every_screen = pytest.mark.parametrize(
    ("width", "scheme"),
    [
        *((1400, "light"), (390, "dark")),
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in ((1400, "dark"), (390, "light"))),
    ],
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs") / "made-20260101-120000"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "driver.log").write_text("starting Ray\n")
    (folder / "logs" / "reward-0.log").write_text("a print of the scorer\nurl?api_key=hunter2 end\n")
    yield from serve(folder)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    MadeRun(groups=20).write(folder / "made-20260102-120000")
    yield from serve(folder / "made-20260101-120000", is_one=False)


def top(element: Locator) -> float:
    box = element.bounding_box()
    assert box is not None
    return box["y"]


def bottom(element: Locator) -> float:
    box = element.bounding_box()
    assert box is not None
    return box["y"] + box["height"]


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@on_every_screen
def test_the_first_screen_has_the_reward_curve_and_the_bottleneck(
    open_page: OpenPage, live: Served, width: int, scheme: str
) -> None:
    page = loaded(open_page, live, width=width, scheme=scheme)
    page.set_viewport_size({"width": width, "height": _HEIGHTS[width]})
    curve = page.locator("#now #chart-reward canvas")
    curve.wait_for()
    bottleneck = page.locator("#now .facts > div", has_text="Bottleneck")
    assert "generation" in bottleneck.inner_text() and "90%" in bottleneck.inner_text()
    assert bottom(bottleneck) < _HEIGHTS[width] and bottom(curve) < _HEIGHTS[width]
    assert page.locator("#chart-reward").count() == 1, "the report's section does not show it again"
    if width == 1400:
        assert len({top(fact) for fact in page.locator("#now .facts > div").all()}) == 1, "they are one row"
    assert fits(page) and violations(page) == []


def test_the_reward_curve_has_the_recorded_numbers_and_grows(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live)
    drawn = """() => echarts.getInstanceByDom(document.querySelector("#chart-reward .plot")).getOption().series
        .map(one => [one.name, one.data.length])"""
    assert page.evaluate(drawn) == [["training reward", 20], ["validation reward", 2]]
    MadeRun(groups=230, first=200).write(live.folder)
    page.wait_for_function(f"() => ({drawn})()[0][1] === 23")


@on_every_screen
def test_the_logs_of_a_worker_are_read_on_the_page(open_page: OpenPage, live: Served, width: int, scheme: str) -> None:
    page = loaded(open_page, live, width=width, scheme=scheme)
    logs = page.locator("#logs")
    assert not logs.get_by_role("log").is_visible()
    logs.get_by_text("Show", exact=True).click()
    logs.get_by_text("starting Ray").wait_for()
    logs.get_by_label("Worker").select_option("reward-0")
    logs.get_by_text("a print of the scorer").wait_for()
    assert "hunter2" not in logs.inner_text()
    line = f"printed while {width} {scheme} looks on, {'with many words ' * 20}"
    with (live.folder / "logs" / "reward-0.log").open("a") as file:
        file.write(f"{line}\n")
    logs.get_by_text(line.strip()).wait_for()
    assert logs.get_by_label("Worker").input_value() == "reward-0"
    assert fits(page) and violations(page) == []


def test_logs_need_the_key_of_the_link(open_page: OpenPage, live: Served) -> None:
    page = loaded(open_page, live, link=live.address)
    page.locator("#logs").get_by_text("Show", exact=True).click()
    page.locator("#logs").get_by_text("open the link").wait_for()
    assert "starting Ray" not in page.locator("#logs").inner_text()


@on_every_screen
def test_the_page_of_a_folder_lists_runs(open_page: OpenPage, several: Served, width: int, scheme: str) -> None:
    page = open_page(several.link, width=width, scheme=scheme, own=several.address)
    rows = page.locator("#list tbody tr")
    rows.first.wait_for()
    cells = [row.locator("td").all_inner_texts() for row in rows.all()][-2:]
    assert [row[:3] for row in cells] == [
        ["made-20260102-120000", "killed", "2"],
        ["made-20260101-120000", "running", "20"],
    ]
    assert [row[4] for row in cells] == ["", "0.500"] and all(float(row[3]) > 0.4 for row in cells)
    assert several.key not in page.url
    box = page.locator("#list").bounding_box()
    assert box is not None and box["width"] > 0.8 * min(width, 1400) - 20
    assert fits(page) and violations(page) == []
    page.get_by_role("link", name="made-20260101-120000").click()
    page.locator("canvas.lanes").wait_for()
    assert page.get_by_role("button", name="Stop the run").is_enabled(), "the key is the tab's"


def test_later_runs_of_a_folder_appear(open_page: OpenPage, several: Served) -> None:
    page = open_page(several.link, own=several.address)
    page.clock.install()
    page.reload()
    page.get_by_role("link", name="made-20260101-120000").wait_for()
    MadeRun(groups=10).write(several.folder.parent / "made-20260103-120000")
    page.clock.fast_forward(5_000)
    page.get_by_role("link", name="made-20260103-120000").wait_for()


# ---- before the first answer -----------------------------------------------------------------------------------------


def opened_without(browser: Browser, address: str, path: str) -> tuple[Page, list[Route]]:
    """Opens a page whose requests of a path get no answer for 5 s; returns them, too."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page = browser.new_context().new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.route(path, hold)
    page.clock.install()
    page.goto(address)
    page.clock.fast_forward(5_000)
    return page, held


def test_a_page_names_its_run_at_once_and_a_server_that_does_not_answer(browser: Browser, live: Served) -> None:
    page, held = opened_without(browser, live.link, "**/events")
    page.locator("#loading", has_text="The server has not answered for 5 s; the page keeps trying.").wait_for()
    assert page.locator("#loading").inner_text().startswith("Loading made-20260101-120000 ...")
    held[-1].continue_()
    page.locator("canvas.lanes").wait_for()
    assert page.locator("#loading").count() == 0 and page.locator("#connection").inner_text() == "live"
    page.context.close()


def test_a_server_that_is_gone_is_named_on_the_empty_page(browser: Browser, live: Served) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.route("**/events", lambda route: route.abort())
    page.goto(live.link)
    page.locator("#loading", has_text="Not connected: the page keeps trying.").wait_for()
    page.context.close()


def test_the_page_of_a_folder_names_a_server_that_does_not_answer(browser: Browser, several: Served) -> None:
    page, held = opened_without(browser, several.link, "**/api/runs")
    said = page.locator("#said")
    page.locator("#said", has_text="The server has not answered for 5 s; the page keeps trying.").wait_for()
    held[-1].continue_()
    page.get_by_role("link", name="made-20260101-120000").wait_for()
    assert said.inner_text() == ""
    page.context.close()


@pytest.mark.parametrize("is_one", [True, False])
def test_without_javascript_a_page_names_what_it_needs(
    browser: Browser, live: Served, several: Served, is_one: bool
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(live.address if is_one else several.address)
    needs = page.locator("noscript p")
    assert needs.is_visible() and needs.inner_text() == "This page needs JavaScript, which is switched off here."
    assert not page.locator(".loading").is_visible()
    context.close()
