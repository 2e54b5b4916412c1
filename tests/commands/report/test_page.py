"""Tests the page in a browser: it loads nothing, shows what was recorded, moves, and can be read and used by anyone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_async.commands.report.data import SECTIONS, page_of
from omni_async.commands.report.file import one_file
from omni_async.records.read.record import read_run
from omni_async.records.write.rundir import append_jsonl
from omni_async.types import LedgerEntry
from tests.support.browser import OpenPage, in_a_thread, played, violations, write_clips

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.sliced(floor=5)

# The data of the curves of a chart, as ECharts has them.
_DRAWN = """id => echarts.getInstanceByDom(document.querySelector(`#${id} .plot`)).getOption().series
    .filter(one => one.name).map(one => ({name: one.name, data: one.data}))"""


@pytest.fixture(scope="session")
def report(painted: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of one run that draws images."""
    return _written(tmp_path_factory.mktemp("one") / "report.html", painted)


@pytest.fixture(scope="session")
def comparison(painted: Path, emulated: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of two runs of different recipes, without what takes seconds to simulate."""
    names = [name for name in SECTIONS if name != "what-it-buys"]
    return _written(tmp_path_factory.mktemp("two") / "report.html", painted, emulated, names=names)


def _written(out: Path, *folders: Path, names: Sequence[str] = ()) -> str:
    made = in_a_thread(lambda: page_of([read_run(folder) for folder in folders], "now", names))  # it simulates
    out.write_text(one_file(made))
    return f"file://{out}"


def updates(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "finished" in line]


def drawn(page: Page, chart: str) -> dict[str, list[list[float]]]:
    return {one["name"]: one["data"] for one in page.evaluate(_DRAWN, chart)}


def open_all(page: Page) -> None:
    page.get_by_role("button", name="Open all").click()


def test_the_first_screen_is_the_verdict_and_charts_hold_the_recorded_numbers(
    report: str, painted: Path, open_page: OpenPage
):
    page = open_page(report)
    assert page.locator("h1").inner_text().startswith(("It learned", "No clear change", "It got worse"))
    assert page.locator("h1").bounding_box()["y"] < 800  # type: ignore[index]
    lines = updates(painted)
    (reward,) = drawn(page, "chart-reward").values()
    assert reward == [[line["update"], line["reward"]] for line in lines]
    page.locator("#throughput summary").first.click()
    page.locator("#chart-metric-images_per_s canvas").wait_for()
    (speed,) = drawn(page, "chart-metric-images_per_s").values()
    assert speed == [[line["update"], line["images_per_s"]] for line in lines]
    page.locator("#tools label", has_text="time").click()
    (by_time,) = drawn(page, "chart-reward").values()
    assert by_time == [[pytest.approx(line["wall_s"] / 60), line["reward"]] for line in lines]


def test_every_chart_is_drawn_and_has_its_numbers_as_a_table(report: str, painted: Path, open_page: OpenPage):
    page = open_page(report)
    open_all(page)
    page.locator("#chart-metric-update_s canvas").wait_for()  # a browser says later that something was opened
    figures = page.locator("figure.chart").count()
    assert figures > 15 and page.locator("figure.chart canvas").count() == figures
    figure = page.locator("#chart-reward")
    figure.locator("summary").click()
    figure.locator("tbody tr").first.wait_for()
    assert figure.locator("tbody tr").count() == len(updates(painted))
    assert figure.locator("tbody td").nth(0).inner_text() == "1"


def test_the_slider_changes_the_images_and_the_base_stays_beside_them(report: str, open_page: OpenPage):
    page = open_page(report)
    slider = page.get_by_role("slider", name="Round to show")
    images = page.locator(".strip").first.locator("img")
    assert slider.get_attribute("aria-valuetext").startswith("after update 12: reward ")  # type: ignore[union-attr]
    base, newest = (images.nth(n).get_attribute("src") for n in (0, 1))
    assert base != newest and base.startswith("data:image/png;base64,")  # type: ignore[union-attr]
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext").startswith("after update 6: ")  # type: ignore[union-attr]
    middle = images.nth(1).get_attribute("src")
    assert images.nth(0).get_attribute("src") == base and middle not in (base, newest)
    page.keyboard.press("Home")
    assert images.nth(0).get_attribute("src") == images.nth(1).get_attribute("src") == base
    assert images.nth(0).evaluate("image => image.naturalWidth") == 32


def test_four_samples_are_shown_until_all_are_asked_for(report: str, open_page: OpenPage):
    page = open_page(report)
    assert page.locator(".strip").count() == 4
    page.get_by_role("button", name="Show all 10 samples").click()
    assert page.locator(".strip").count() == 10


def test_a_run_on_preferences_shows_what_it_learned_and_no_reward(
    preferring: Path, tmp_path: Path, open_page: OpenPage
):
    page = open_page(_written(tmp_path / "report.html", preferring))
    assert page.locator("h1").inner_text() == "Trained on preferences for 4 updates"
    (accuracy,) = drawn(page, "chart-accuracy").values()
    assert accuracy == [[line["update"], line["accuracy"]] for line in updates(preferring)]
    assert page.locator("#chart-reward").count() == 0 and not violations(page)


def test_films_and_sounds_play(tmp_path: Path, open_page: OpenPage):
    write_clips(tmp_path / "run")
    page = open_page(_written(tmp_path / "report.html", tmp_path / "run"))
    assert played(page, "a film") == (pytest.approx(1, abs=0.1), 32, 16)
    assert played(page, "a tone") == (pytest.approx(0.5, abs=0.1), 0, 0)
    assert not violations(page)


@pytest.mark.parametrize("width", [360, pytest.param(768, marks=pytest.mark.thorough)])
def test_a_narrow_screen_scrolls_down_only(comparison: str, open_page: OpenPage, width: int):
    page = open_page(comparison, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#chart-reward canvas").bounding_box()["width"] < width  # type: ignore[index]


@pytest.mark.parametrize(("address", "scheme"), [("comparison", "light"), ("report", "dark")])
def test_axe_has_nothing_to_object(
    address: str, scheme: str, request: pytest.FixtureRequest, report: str, comparison: str, open_page: OpenPage
):
    page = open_page(request.getfixturevalue(address), scheme=scheme)
    open_all(page)
    page.locator("#chart-reward summary").click()
    page.locator("#chart-reward tbody tr").first.wait_for()
    assert not violations(page)


def test_the_colours_follow_the_reader_s_setting(report: str, open_page: OpenPage):
    page = open_page(report, scheme="light")
    colours = """() => [getComputedStyle(document.querySelector('.card')).backgroundColor,
        echarts.getInstanceByDom(document.querySelector('#chart-reward .plot')).getOption()
            .series[0].itemStyle.color]"""
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    # Of charts, once the browser has told the page.
    page.wait_for_function(f"light => ({colours})().every((colour, n) => colour !== light[n])", arg=light)


def test_a_page_is_used_with_the_keyboard_alone(comparison: str, painted: Path, open_page: OpenPage):
    page = open_page(comparison)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "page"
    name = page.locator("#chart-reward .legend button").first
    name.focus()
    page.keyboard.press("Space")
    hidden = "id => echarts.getInstanceByDom(document.querySelector(`#${id} .plot`)).getOption().legend[0].selected"
    for _ in range(2):
        assert name.get_attribute("aria-pressed") == "false"
        assert page.evaluate(hidden, "chart-reward") == {name.inner_text(): False}
        assert page.evaluate("document.activeElement.textContent") == name.inner_text()
        page.evaluate(  # news of another section, and of this one, leave hidden what the reader hid
            """() => { const data = JSON.parse(document.getElementById("data").textContent);
            data.sections.find((one) => one.id === "curves").blocks.forEach((one) => (one.hint = "changed"));
            omniAsync.page.update(data); }"""
        )
    page.locator("#staleness summary").first.press("Enter")
    page.locator("#chart-staleness canvas").wait_for()
    run = page.locator("#staleness .choice input").first
    run.focus()
    before = page.locator("#staleness .text").inner_text(), drawn(page, "chart-staleness")
    page.keyboard.press("ArrowRight")
    assert (page.locator("#staleness .text").inner_text(), drawn(page, "chart-staleness")) != before
    page.locator("#configuration summary").first.press("Enter")
    search = page.get_by_role("searchbox", name="Search the table")
    search.focus()
    page.keyboard.type("max_updates")
    found = page.locator("#table-configuration tbody tr td:first-child").all_inner_texts()
    assert "staleness.max_updates" in found and all("max_updates" in key for key in found)


def test_an_update_keeps_what_the_reader_chose_and_changes_what_is_new(report: str, painted: Path, open_page: OpenPage):
    page = open_page(report)
    slider = page.get_by_role("slider", name="Round to show")
    slider.focus()
    page.keyboard.press("Home")
    page.locator("#chart-reward summary").click()
    data = page_of([read_run(painted)], "later", ("samples", "curves"))
    curve = data["sections"][1]["blocks"][1]["series"][0]
    curve["x"]["update"].append(13.0)
    curve["x"]["minutes"].append(9.0)
    curve["y"].append(0.75)
    sections = page.locator("section").count()
    for _ in range(2):  # the same once more changes nothing
        page.evaluate("data => omniAsync.page.update(data)", data)
        (reward,) = drawn(page, "chart-reward").values()
        assert reward[-1] == [13, 0.75] and len(reward) == 13
        assert page.locator("#chart-reward tbody tr").count() == 13
        assert slider.get_attribute("aria-valuetext").startswith("before training")  # type: ignore[union-attr]
        assert page.locator("section").count() == sections
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def test_what_a_run_says_is_text_and_never_markup(painted: Path, tmp_path: Path, open_page: OpenPage):
    evil = "</script><img src=x onerror=\"document.title='gone'\"><b>bold</b>"
    data = in_a_thread(lambda: page_of([read_run(painted)], evil))
    data["title"] = data["runs"][0]["id"] = evil
    for section in data["sections"]:
        section["title"] = section["lead"] = evil
    samples = next(section for section in data["sections"] if section["id"] == "samples")
    for strip in samples["tabs"][0]["blocks"][0]["strips"]:
        strip["prompt"] = evil
    (tmp_path / "page.html").write_text(one_file(data))
    page = open_page(f"file://{tmp_path / 'page.html'}")
    assert page.title() == f"{evil} · omni-async" and page.locator("b").count() == 0
    assert page.locator("h1").inner_text() == page.locator(".strip figcaption").first.inner_text() == evil


def test_a_group_is_followed_on_the_timeline_of_a_report(report: str, open_page: OpenPage):
    page = open_page(report)
    page.get_by_role("textbox", name="Group number").fill("3")
    page.get_by_role("button", name="Follow group").click()
    way = page.get_by_role("complementary", name="One group's way")
    way.wait_for()
    assert "Group 3" in way.inner_text() and "Trained in update 2 " in way.inner_text()


def _forgetful(painted: Path, folder: Path) -> Path:
    """Copies a run, whose scorer fails two samples of the last round there, and of which two groups are dropped."""
    shutil.copytree(painted, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max((line for line in lines if "validation/reward" in line), key=lambda line: line["update"])
    asked, scores = last["asked"], last["scores"]
    kept = {name: [None, None, *column[2:]] for name, column in scores.items()}
    mean = sum(kept["reward"][2:]) / (asked - 2)
    reasons = [{"reason": "no face found", "samples": 2}]
    last |= {"validation/reward": mean, "samples": asked - 2, "not_scored": 2, "reasons": reasons, "scores": kept}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for group in (900, 901):
        entry = LedgerEntry(
            "run", group, 0, "dropped", "generation failed 3 times: 3608 tokens", 0, *[None] * 3, 3, None
        )
        append_jsonl(folder / "ledger.jsonl", entry)
    return folder


def test_samples_without_a_score_and_dropped_groups_are_on_the_first_screen_with_their_reasons(
    painted: Path, tmp_path: Path, open_page: OpenPage
):
    folder = _forgetful(painted, tmp_path / "run")
    page = open_page(_written(tmp_path / "report.html", folder))
    asked = next(each.asked for each in read_run(folder).validation)
    verdict = page.locator("#verdict")
    warning = verdict.get_by_text(f"Validation of version 12: 2 of {asked} samples not scored: no face found")
    assert warning.is_visible() and "it cannot be the best" in warning.inner_text()
    assert verdict.get_by_text("groups were dropped: generation failed: 3608 tokens").is_visible()
    over = f"over the {asked - 2} of {asked} samples that both have scored"
    assert over in verdict.inner_text()
    note = page.locator("#chart-validation-reward")
    assert f"not comparable as they are: 12 ({asked - 2} of {asked})" in note.inner_text()
    assert page.locator("#alerts").get_by_text("Validation of version 12").is_visible()
    shown = page.locator("#samples").inner_text()
    assert f"over {asked - 2} of {asked} samples" in shown
    assert not page.locator("text=NaN").count()
