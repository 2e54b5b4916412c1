"""Tests what the live page tells: news while somebody looks, windows, groups, and what its buttons do."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_async.commands.command_line import newest_run
from omni_async.commands.report.blocks import Section
from omni_async.commands.report.data import SECTIONS
from omni_async.commands.report.shown import Shown
from omni_async.commands.watch import live, report_sections
from omni_async.commands.watch.now import now_section, require_answer
from omni_async.records.read.follow import Follower
from omni_async.records.write.activity import Activity
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Counters, summarise, write_summary
from omni_async.runtime.driver.control_socket import Request, Tell
from tests.commands.watch.watch_world import Page, RunningJob, watched
from tests.support import patience
from tests.support.loops import settle
from tests.support.made_run import MadeRun
from tests.support.patience import PATIENCE


@asynccontextmanager
async def news(page: Page) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yields what the server tells, as it comes."""

    async def told() -> AsyncIterator[dict[str, Any]]:
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    async with page.client.get(f"{page.address}/events") as response:
        assert response.content_type == "text/event-stream"
        yield told()


async def until(messages: AsyncIterator[dict[str, Any]], condition: Any) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        async for message in messages:
            if condition(message):
                return message
    raise AssertionError("the server said no more")


def now(message: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in message["page"]["sections"] if one["id"] == "now")


def facts(message: dict[str, Any]) -> dict[str, str]:
    block = next(block for block in now(message)["blocks"] if block["kind"] == "facts")
    return {fact["label"]: fact["value"] for fact in block["items"]}


def status(message: dict[str, Any]) -> str:
    found: str = message["page"]["runs"][0]["status"]
    return found


async def test_a_run_that_goes_on_is_told_as_it_goes_and_one_that_died_too(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        async with RunningJob(tmp_path).answering(), news(page) as messages:
            first = await until(messages, lambda one: status(one) == "running" and "Reward" in facts(one))
            assert facts(first)["Update"] == "4 of 100"
            measured = await until(messages, lambda one: "Staleness" in facts(one))
            assert "2 at most, in the last update; reserve 0.5 s, the trainer waited 0 s" in str(now(measured))
            meters, devices = (block for block in now(first)["blocks"] if block["kind"] == "meters")
            assert [(one["label"], one["taken"], one["of"]) for one in meters["items"]] == [
                ("slots", 8, 12), ("trajectories", 60, 96), ("bytes", 2_000_000, None),
            ]  # fmt: skip
            assert [one["text"] for one in devices["items"]] == ["41 GiB of 80 GiB, busy 97%"]
            assert "NVIDIA H100" in devices["hint"] and devices["items"][0]["label"] == "0: rollout-0, trainer"
            assert "2 of 40 groups were rejected: zero reward variance." in str(now(first))
            MadeRun(groups=110, first=40).write(tmp_path)
            await until(messages, lambda one: "440 generated for training up to the last update" in str(now(one)))
        async with news(page) as messages:
            died = await until(messages, lambda one: status(one) == "killed")
        assert facts(died)["Update"] == "11" and "checkpoint.resume=auto" in str(now(died))
        assert "7 of 110 groups were rejected: zero reward variance." in str(now(died)), "of the ledger"


async def test_the_reward_the_bottleneck_and_problems_come_first(tmp_path: Path) -> None:
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering(), news(page) as messages:
        first = await until(messages, lambda one: "Bottleneck" in facts(one) and one["report"] > 0)
        _, sections = await page.get("/api/report")
    kinds = [block["kind"] for block in now(first)["blocks"]]
    assert kinds[:2] == ["facts", "chart"] and kinds.index("meters") < kinds.index("actions") < kinds.index("table")
    assert [*facts(first)] == ["Update", "Bottleneck", "Reward", "Samples/s", "Staleness", "Groups"]
    (chart,) = (block for block in now(first)["blocks"] if block["kind"] == "chart")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["name"] for one in chart["series"]] == ["training reward"]
    assert chart["series"][0]["y"] == [line["reward"] for line in lines]
    assert chart["series"][0]["x"]["minutes"] == [pytest.approx(line["wall_s"] / 60, abs=1e-3) for line in lines]
    assert "reward" not in {block.get("id") for one in sections for block in one["blocks"]}


@pytest.mark.parametrize(
    ("busy", "budget", "stage"),
    [
        ({"rollout": 0.95, "reward": 0.4, "trainer": 0.6}, 2, "generation"),
        ({"rollout": 0.6, "reward": 0.97, "trainer": 0.5}, 2, "scoring"),
        ({"rollout": 0.5, "reward": 0.2, "trainer": 0.98}, 2, "training"),
        ({"rollout": 0.5, "reward": 0.1, "trainer": 0.4}, 0, "none"),
    ],
)
def test_the_bottleneck_is_the_stage_that_the_newest_updates_waited_for(
    tmp_path: Path, busy: dict[str, float], budget: int, stage: str
) -> None:
    made = MadeRun(groups=60)
    made.write(tmp_path)
    run = RunDirectory(tmp_path)
    run.config_yaml.write_text(f"run: {{name: made}}\nstaleness: {{max_updates: {budget}}}\n")
    for update in range(7, 13):
        numbers = {f"busy/{role}": share for role, share in busy.items()}
        run.append_metrics(update, {**made.metrics(update), **numbers})
    follower = Follower(tmp_path)
    assert [*follower.poll()]
    section = now_section(follower, "running", None, [], [], None)
    (found,) = (one for one in section["blocks"][0]["items"] if one["label"] == "Bottleneck")
    assert found["value"] == stage and f"generation {busy['rollout']:.0%}" in found["detail"]


async def test_a_run_that_is_over_has_the_groups_of_its_summary(tmp_path: Path) -> None:
    counters = Counters(admitted=50, trained=40, rejected=0, dropped=10, live=0)
    summary = summarise(
        run="made", status="interrupted", started=0, finished=1, images=1, rewards=[1.0], staleness=[],
        counters=counters, activity=Activity((0.0, math.inf)), devices=1, reason="on request",
    )  # fmt: skip
    async with watched(tmp_path) as page:
        write_summary(tmp_path / "summary.json", summary)
        async with news(page) as messages:
            told = await until(messages, lambda one: status(one) == "interrupted" and "Groups" in facts(one))
        assert facts(told)["Groups"] == "50" and "40 trained, 0 rejected, 10 dropped, 0 live" in str(now(told))


async def test_nothing_is_read_while_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PAUSE_S", 0.0)  # whoever looked would look again at once
    monkeypatch.setattr(live, "FRUGAL", 0.0)
    looked: list[live.LiveRun] = []
    former = live.LiveRun.look

    async def counted(self: live.LiveRun) -> float:
        looked.append(self)
        return await former(self)

    monkeypatch.setattr(live.LiveRun, "look", counted)
    async with watched(tmp_path) as page:
        await settle()
        assert not looked
        async with news(page) as messages:
            await until(messages, lambda one: len(looked) > 2)
        await patience.until(lambda: not looked[0].num_viewers, "the server notices that the reader has gone")
        before = len(looked)
        await settle()
        assert len(looked) == before


async def test_a_page_that_is_closed_as_news_come_is_closed(tmp_path: Path) -> None:
    MadeRun(groups=40).write(tmp_path)
    run = live.LiveRun(RunDirectory(tmp_path), report_sections.Sections())
    keeping, messages = asyncio.create_task(run.keep()), run.messages()
    await anext(messages)
    await settle()  # now it rests
    run._changed()
    keeping.cancel()
    await asyncio.wait({keeping}, timeout=PATIENCE)
    assert keeping.cancelled()
    await messages.aclose()


async def test_the_sections_of_the_report_come_once_they_are_made(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        assert await page.get("/api/report") == (200, None)
        async with news(page) as messages:
            await until(messages, lambda one: one["report"] >= 0)
            _, sections = await page.get("/api/report")
            await until(messages, lambda one: one["report"] > 0)
            assert "It is being simulated" not in str(await page.get("/api/report"))
        assert {"verdict", "curves", "staleness"} <= {one["id"] for one in sections}
        assert "lanes" not in {block["kind"] for one in sections for tab in one["tabs"] for block in tab["blocks"]}


def test_the_section_that_needs_all_spans_is_made_more_rarely_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    former = SECTIONS["waiting"]

    def counted(shown: Sequence[Shown]) -> Section:
        nonlocal made
        made += 1
        return former(shown)

    monkeypatch.setitem(SECTIONS, "waiting", counted)
    monkeypatch.setattr(report_sections, "FRUGAL", 1e9)  # else as long as the machine may stand still
    run = MadeRun(groups=40).write(tmp_path)
    run._claim()
    sections = live.Sections()
    found = [sections.make(run) for _ in range(3)]
    names = [[one["id"] for one in json.loads(one.content)] for one in found]
    assert made == 1 and names[0] == names[2] and "waiting" in names[2]
    assert [one.is_whole for one in found] == [False, True, True]
    assert b"It is being simulated" in found[0].content and b"It is being simulated" not in found[1].content
    run.release()
    sections.make(run)
    assert made == 2


async def test_a_run_that_did_nothing_has_a_whole_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: made}\n")
    (tmp_path / "ledger.jsonl").touch()  # nothing is made there
    async with watched(tmp_path) as page, news(page) as messages:
        await until(messages, lambda one: one["report"] > 0)
        assert "It is being simulated" not in str(await page.get("/api/report"))


async def test_why_the_report_cannot_be_made_stays_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, folder: RunDirectory) -> None:
        raise ValueError("a line that nobody expected")

    monkeypatch.setattr(live, "PAUSE_S", 0.01)
    monkeypatch.setattr(live.Sections, "make", broken)
    async with watched(tmp_path) as page, news(page) as messages:
        for _ in range(3):
            await until(
                messages, lambda one: "cannot be made: ValueError: a line that nobody expected" in str(now(one))
            )


async def test_a_folder_that_cannot_be_read_is_said_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    former = live.Follower.poll

    def poll(self: live.Follower) -> Iterator[None]:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise ValueError("a line that nobody expected")
        return former(self)

    monkeypatch.setattr(live, "PAUSE_S", 0.01)
    monkeypatch.setattr(live.Follower, "poll", poll)
    async with watched(tmp_path) as page, news(page) as messages:
        await until(messages, lambda one: "cannot be read: ValueError: a line that nobody expected" in str(now(one)))
        await until(messages, lambda one: "Update" in facts(one) and "cannot be read" not in str(now(one)))


async def read(page: Page) -> None:
    """Waits until the server has read the folder."""
    async with news(page) as messages:
        await until(messages, lambda one: any("spans" in str(part) for part in one["page"]["sections"]))


async def test_a_window_has_boxes_where_they_are_few_and_shares_where_they_are_many(tmp_path: Path) -> None:
    async with watched(tmp_path, groups=3000) as page:
        await read(page)
        code, few = await page.get("/api/window?from=0&to=8&first=0&last=4&columns=10")
        assert code == 200 and len(few["boxes"]["start"]) == len(few["boxes"]["lane"]) > 50
        assert max(few["boxes"]["start"]) <= 8 and set(few["boxes"]["group"]) >= set(range(10))
        _, many = await page.get("/api/window?from=0&to=1200&first=0&last=2&columns=10")
        assert "boxes" not in many and len(base64.b64decode(many["busy"])) == 20
        assert max(base64.b64decode(many["busy"])) == 255


@pytest.mark.parametrize("query", ["", "from=0", "from=1&to=1&first=0&last=1&columns=1", "from=0&to=nan&first=0&last=1&columns=1", "from=0&to=1&first=0&last=5000&columns=1", "from=0&to=1&first=0&last=1&columns=1e9", "from=0&to=1&first=0&last=1000&columns=8000", "from=0&to=1&first=0&last=1&columns=1&more=1"])  # fmt: skip  # noqa: E501
async def test_a_window_that_makes_no_sense_is_refused(tmp_path: Path, query: str) -> None:
    async with watched(tmp_path) as page:
        code, answer = await page.get(f"/api/window?{query}")
        assert code == 400 and answer["error"]


async def test_a_group_has_its_ledger_line_its_prompt_its_spans_and_the_samples_of_its_update(tmp_path: Path) -> None:
    MadeRun(groups=40).write(tmp_path)
    (tmp_path / "samples" / "train-000002.jsonl").write_text(
        '{"prompt": "prompt 12", "image": "train-000002-00.png"}\n'
    )
    async with watched(tmp_path) as page:
        await read(page)
        code, found = await page.get("/api/group/12")
        assert code == 200 and found["prompt"] == "prompt 12" and found["entry"]["trained_version"] == 2
        assert [one["kind"] for one in found["spans"]] == ["generate"] * 4 + ["score", "train"]
        assert found["spans"][0]["args"]["version_steps"] == [[0, 6], [1, 4]]
        assert found["media"] == [{"src": "samples/train-000002-00.png"}]
        assert await page.get("/api/group/4000") == (200, None)


# ---- buttons ---------------------------------------------------------------------------------------------------------


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "actions.jsonl").read_text().splitlines()]


async def test_a_button_changes_the_run_and_is_recorded_with_its_address(tmp_path: Path) -> None:
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering() as job:
        assert await page.post("/api/act", {"action": "scale", "workers": {"rollout": 3}}) == (200, {"result": "done"})
        assert job.workers == {"rollout": 3, "reward": 1}
        assert await page.post("/api/act", {"action": "stop"}) == (200, {"result": "done"})
        assert job.stops == 1
        one, other = recorded(tmp_path)
        assert (one["action"], one["workers"], one["address"], one["result"]) == (
            "scale",
            {"rollout": 3},
            "127.0.0.1",
            "done",
        )
        assert (other["action"], other["workers"], other["result"]) == ("stop", {}, "done")
        assert other["time"] >= one["time"] > 1.7e9 and one["seconds"] >= 0
        async with news(page) as messages:
            told = await until(messages, lambda message: "Done from this page" in str(message))
        assert "scale rollout=3" in str(now(told))


async def test_a_run_is_stopped_while_it_waits_for_new_workers(tmp_path: Path) -> None:
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering() as job, news(page) as messages:
        job.may_scale.clear()
        scaling = asyncio.create_task(page.post("/api/act", {"action": "scale", "workers": {"rollout": 3}}))
        await until(messages, lambda one: "waiting for rollout-2 to load" in str(now(one)))
        async with asyncio.timeout(PATIENCE):
            assert await page.post("/api/act", {"action": "stop"}) == (200, {"result": "done"})
        assert job.stops == 1 and not job.asked
        job.may_scale.set()
        assert await scaling == (200, {"result": "done"})


async def test_what_the_run_refuses_is_told_and_recorded(tmp_path: Path) -> None:
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering() as job:
        code, answer = await page.post("/api/act", {"action": "scale", "workers": {"rollout": 1000}})
        assert code == 200 and "there are no 100 devices" in answer["result"]
        assert not job.asked and "there are no 100 devices" in recorded(tmp_path)[0]["result"]


async def test_a_run_that_is_over_cannot_be_changed_and_the_attempt_is_recorded(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        _, answer = await page.post("/api/act", {"action": "stop"})
        assert "is not running here" in answer["result"]
        assert len(recorded(tmp_path)) == 1


async def test_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering() as job:
        (tmp_path / "actions.jsonl").mkdir()
        code, answer = await page.post("/api/act", {"action": "stop"})
        assert code == 500 and "could not be recorded" in answer["error"] and job.stops == 1


async def test_more_viewers_than_the_server_keeps_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_MOST_VIEWERS", 1)
    async with watched(tmp_path) as page, news(page) as messages:
        await anext(messages)
        assert (await page.get("/events"))[0] == 503


def test_the_newest_run_is_watched_if_none_is_named(tmp_path: Path) -> None:
    import os

    for name, time in (("old", 1), ("new", 3), ("middle", 2)):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        run.config_yaml.write_text("{}")
        os.utime(run.config_yaml, (time, time))
    assert newest_run(tmp_path).name == "new"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_the_command_while_somebody_looks_and_says_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    MadeRun(10, 1).write(tmp_path / "run")
    command = [sys.executable, "-m", "omni_async.cli", "watch", str(tmp_path / "run"), "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        assert server.stdout is not None and server.stderr is not None
        address = server.stdout.readline().split(" at ")[1].partition("/#")[0]
        with urllib.request.urlopen(f"{address}/events", timeout=PATIENCE) as events:
            assert events.readline().startswith(b"data: ")
            server.send_signal(number)
            assert server.wait(PATIENCE) == code and server.stderr.read() == ""


@pytest.mark.parametrize(
    "answer",
    [
        {"progress": 1.5},
        {"progress": {"told": "text"}},
        {"parts": {"rollout-0": 1.5}},
        {"buffers": {"groups": {"live": [1]}}},
        {"parts": {str(part): {} for part in range(20_001)}},
        {"progress": {"update": 10**30}},
    ],
)
def test_an_answer_of_another_shape_is_not_shown(answer: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        require_answer(answer)


async def test_the_page_of_a_run_whose_engine_holds_no_weights_yet_has_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: RunningJob, request: Request, tell: Tell) -> dict[str, Any]:
        return {**await usual(self, request, tell), "engines": {"rollout-0": 3, "rollout-1": -1}}

    usual = RunningJob._answer
    monkeypatch.setattr(RunningJob, "_answer", answer)
    async with watched(tmp_path) as page, RunningJob(tmp_path).answering(), news(page) as messages:
        told = await until(messages, lambda one: status(one) == "running")
    (rows,) = (block["rows"] for block in now(told)["blocks"] if block.get("id") == "parts")
    assert [row[::2] for row in rows[:2]] == [["rollout-0", "version 3"], ["rollout-1", "none yet"]]


async def test_a_player_gets_the_part_of_a_film_that_it_asks_for(tmp_path: Path) -> None:
    async with watched(tmp_path) as page:
        (tmp_path / "samples" / "train-000001-00.mp4").write_bytes(b"0123456789")

        async def part(asked: str) -> tuple[int, str | None, bytes]:
            address = f"{page.address}/samples/train-000001-00.mp4"
            async with page.client.get(address, headers={"Range": asked}) as response:
                assert response.content_type == ("video/mp4" if response.ok else "application/json")
                assert response.headers["Cache-Control"] == "no-store"
                return response.status, response.headers.get("Content-Range"), await response.read()

        assert await part("bytes=0-1") == (206, "bytes 0-1/10", b"01")
        assert await part("bytes=8-") == (206, "bytes 8-9/10", b"89")
        assert await part("bytes=-3") == (206, "bytes 7-9/10", b"789")
        assert (await part("bytes=10-"))[0] == 416
        for another in ("bytes=0-0,-1", "lines=1-2", "bytes=5-2"):
            assert await part(another) == (200, None, b"0123456789")
