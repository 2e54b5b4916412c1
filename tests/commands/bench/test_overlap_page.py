"""Tests the page of a benchmark: its numbers are those of the JSON next to it, and a browser shows them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from omni_async.commands.bench.comparison import CATEGORIES
from omni_async.commands.bench.overlap import run_overlap
from omni_async.commands.bench.table import number, rounded
from tests.commands.bench import overlap_world as world
from tests.support.browser import OpenPage, violations

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "</script><img src=x onerror=\"document.title='gone'\">"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark of three arms, one of which failed with a text that is no markup."""
    folder = tmp_path_factory.mktemp("bench")
    failing = world.FakeTrain(
        {"async-2": 5.0}, ends=lambda arm, number: ("failed", EVIL) if arm == "async-1" and number == 1 else None
    )
    arms, quiet = ("sync", "async:1", "async:2"), Console(file=io.StringIO())
    given: dict[str, Any] = {"train": failing, "simulator": world.half_the_profile, "terminal": quiet}
    run_overlap(world.write_recipe(folder), out=folder / "out", arms=arms, repeats=3, **given)
    return folder / "out"


def data_of(page: str) -> dict[str, Any]:
    """Returns the data that a page carries."""
    _, _, rest = page.partition('<script type="application/json" id="data">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found


def block(data: dict[str, Any], section: str, kind: str) -> dict[str, Any]:
    blocks = next(one["blocks"] for one in data["sections"] if one["id"] == section)
    found: dict[str, Any] = next(one for one in blocks if one["kind"] == kind)
    return found


def test_the_numbers_of_the_page_are_those_of_the_json(out: Path) -> None:
    written = json.loads((out / "overlap.json").read_text())
    data = data_of((out / "overlap.html").read_text())
    answer, summaries = written["answer"], written["summary"]
    causes = block(data, "verdict", "table")
    assert causes["columns"][1:] == ["sync", "async:2", "saved"]
    shown = [one for one in answer["causes"] if max(one["before_s"], one["after_s"]) > 1e-3]
    names = ("before_s", "after_s", "saved_s")
    seconds = [one[name] for one in shown for name in names] + [answer["before_s"], answer["after_s"]]
    seconds.append(answer["before_s"] - answer["after_s"])
    assert [cell for row in causes["rows"] for cell in row[1:]] == rounded(seconds)
    assert [row[0] for row in causes["rows"]] == [*(one["name"] for one in shown), "the update"]
    assert sum(one["saved_s"] for one in answer["causes"]) == pytest.approx(seconds[-1], abs=1e-9)

    stacks = block(data, "arms", "stacks")
    used = [name for name in CATEGORIES if any(one["attribution"][name] for one in summaries)]
    assert [name for name, _ in stacks["parts"]] == [CATEGORIES[name] for name in used]
    assert [one["name"] for one in stacks["items"]] == ["sync", "async:1", "async:2"]
    for item, summary in zip(stacks["items"], summaries, strict=True):
        assert item["values"] == [summary["attribution"][name] for name in used]
    table = block(data, "arms", "table")
    medians = next(row for row in table["rows"] if row[0] == "median")
    assert medians[1:] == [number(one["step_s"]["median"]) for one in summaries]


def test_the_page_is_one_file(out: Path) -> None:
    page = (out / "overlap.html").read_text()
    assert "default-src 'none'" in page and "<script src" not in page and '<link rel="stylesheet"' not in page
    assert EVIL not in page


def test_a_tile_names_the_rounds_of_its_number(out: Path) -> None:
    answer = json.loads((out / "overlap.json").read_text())["answer"]
    tiles = block(data_of((out / "overlap.html").read_text()), "verdict", "facts")["items"]
    labels = [tile["label"] for tile in tiles]
    of_round = f"round {answer['round'] + 1}"
    assert labels[0] == f"saved per update, {of_round}" and labels[1] == f"an update of sync, {of_round}"
    assert labels[3] == "times as fast, median of 3 rounds"


# ---- in a browser ----------------------------------------------------------------------------------------------------


def opened(out: Path, open_page: OpenPage, **how: Any) -> Page:
    return open_page(f"file://{out / 'overlap.html'}", **how)


def test_the_first_screen_is_the_seconds_saved_by_cause(out: Path, open_page: OpenPage) -> None:
    answer = json.loads((out / "overlap.json").read_text())["answer"]
    page = opened(out, open_page)
    saved = rounded([answer["before_s"], answer["after_s"], answer["before_s"] - answer["after_s"]])[2]
    assert page.locator("h1").inner_text().startswith(f"async:2 saves {saved} s per update over sync: ")
    rows = page.locator("#table-causes tbody tr")
    assert rows.first.inner_text().split("\t")[0] == "generation overlapped with training"
    assert rows.last.inner_text().split("\t")[-1] == saved
    assert rows.last.bounding_box()["y"] < 800  # type: ignore[index]
    assert page.locator(".stacks li").count() == 3 and not page.locator("#tools .choice").is_visible()
    assert EVIL in page.locator("#setup").inner_text() and page.locator("img").count() == 0


def test_a_bar_is_as_long_as_its_seconds(out: Path, open_page: OpenPage) -> None:
    steps = [one["step_s"]["median"] for one in json.loads((out / "overlap.json").read_text())["summary"]]
    page = opened(out, open_page)
    wide = page.locator(".stacks .stack").first.bounding_box()["width"]  # type: ignore[index]
    widths = "item => [...item.querySelectorAll('.stack span')].map(part => part.getBoundingClientRect().width)"
    for place, step in enumerate(steps):
        drawn = sum(page.locator(".stacks li").nth(place).evaluate(widths))
        assert drawn == pytest.approx(wide * step / max(steps), rel=0.02)


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "dark")])
def test_it_fits_a_phone_in_light_and_dark_and_axe_has_nothing_to_object(
    out: Path, open_page: OpenPage, width: int, scheme: str
) -> None:
    page = opened(out, open_page, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert not violations(page)


def test_the_colours_of_the_bars_follow_the_readers_setting(out: Path, open_page: OpenPage) -> None:
    page = opened(out, open_page, scheme="light")
    colour = "getComputedStyle(document.querySelector('.stacks .stack span')).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {colour} !== light", arg=light)
