"""Tests the live page of a folder of runs, and the logs on the page of a run."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from omni_async.commands.watch import lives
from omni_async.commands.watch.guard import KEY_HEADER
from omni_async.commands.watch.serve import serving
from tests.commands.watch.watch_world import TOKEN, Page, watched
from tests.support.made_run import MadeRun

FIRST, SECOND = "made-20260101-120000", "made-20260102-120000"


def made(folder: Path) -> Path:
    MadeRun(groups=20).write(folder)
    (folder / "config.yaml").write_text("run: {name: made}\n")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in (FIRST, SECOND):
        made(tmp_path / "runs" / name)
    return tmp_path / "runs"


async def test_a_folder_lists_its_runs_with_a_page_of_each(runs: Path) -> None:
    made(runs.parent / "outside")
    async with serving(runs, "127.0.0.1", 0, None, is_one=False) as (address, key), aiohttp.ClientSession() as client:
        page = Page(address, key, client, runs)
        status, text = await page.get("/")
        assert status == 200 and "folder.js" in text and "Loading the list of runs ..." in text
        assert (await page.get("/folder.js"))[0] == (await page.get("/style.css"))[0] == 200
        _, listed = await page.get("/api/runs")
        assert [one["run"] for one in listed] == [SECOND, FIRST]
        for one in listed:
            status, text = await page.get(f"/{one['run']}/")
            assert status == 200 and "live.js" in text and f">Loading {one['run']} ...</p>" in text
            assert (await page.get(f"/{one['run']}/vendor/echarts.min.js"))[0] == 200
            async with client.get(f"{address}/{one['run']}/events") as events:
                message = (await events.content.readuntil(b"\n\n")).removeprefix(b"data: ")
            assert json.loads(message)["page"]["title"] == one["run"]
        late = made(runs / "made-20260103-120000").name
        assert (await page.get("/api/runs"))[1][0]["run"] == late and (await page.get(f"/{late}/"))[0] == 200
        for name in ("none", "%2e%2e", "..%2foutside", "outside"):
            assert (await page.get(f"/{name}/api/report"))[0] == 404, name
        status, _ = await page.post(f"/{late}/api/act", {"action": "stop"}, **{KEY_HEADER: "wrong"})
        assert status == 403


async def test_a_run_that_nobody_looks_at_makes_room(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "_MOST_OPEN", 1)
    async with serving(runs, "127.0.0.1", 0, None, is_one=False) as (address, key), aiohttp.ClientSession() as client:
        page = Page(address, key, client, runs)
        assert (await page.get(f"/{FIRST}/"))[0] == (await page.get(f"/{SECOND}/"))[0] == 200
        async with client.get(f"{address}/{SECOND}/events") as events:
            await events.content.readuntil(b"\n\n")
            assert (await page.get(f"/{FIRST}/"))[0] == 503
        assert (await page.get(f"/{SECOND}/"))[0] == 200


async def test_the_pages_of_a_folder_need_the_token(runs: Path) -> None:
    async with serving(runs, "127.0.0.1", 0, TOKEN, is_one=False) as (address, key), aiohttp.ClientSession() as client:
        page = Page(address, key, client, runs)
        for path in ("/", f"/{FIRST}/"):
            status, text = await page.get(path)
            assert status == 401 and "login.js" in text
        for path in ("/api/runs", f"/{FIRST}/api/report", f"/{FIRST}/events"):
            assert (await page.get(path))[0] == 401
            assert (await page.get(path.replace("events", "api/group/0"), Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert (await page.post(f"/{FIRST}/login", {"token": TOKEN}))[1] == {"key": key}


async def test_logs_need_the_key(tmp_path: Path) -> None:
    """A process may print anything, so who only looks does not see it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "reward-0.log").write_text("a line\nurl?api_key=hunter2 end\n")
    async with watched(tmp_path) as page:
        assert (await page.get("/api/log/reward-0"))[0] == 403
        key = {KEY_HEADER: page.key}
        status, lines = await page.get("/api/log/reward-0", **key)
        assert status == 200 and lines[0] == "a line" and "hunter2" not in lines[1]
        for name in ("reward-1", "..%2fconfig", "%2e%2e"):
            assert (await page.get(f"/api/log/{name}", **key))[0] == 404
