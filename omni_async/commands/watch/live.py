"""Keeps a page of one run up to date while it has viewers; does nothing otherwise.

Waits for a viewer, and pauses between two looks at the folder: at least a second, and 300 times the processor time of
the last look. A thread rebuilds the report's sections with pauses of the same kind, and separately the section of the
timeline. Each of the three parts takes at most a third of a per cent, so the page costs less than one per cent of one
core however large the run is. One-time work, such as the first look, does not count. Status requests over the run's
control socket are spaced in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from omni_async import __version__
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import cancel
from omni_async.commands.report.file import as_json
from omni_async.commands.report.lanes import HINT
from omni_async.commands.watch.actions import Actions
from omni_async.commands.watch.now import now_section, require_answer
from omni_async.commands.watch.report_sections import FRUGAL, Sections
from omni_async.records.read.alerts import alerts
from omni_async.records.read.follow import Follower
from omni_async.records.read.logs import logs_of
from omni_async.records.read.record import RunStatus, run_status
from omni_async.records.read.seen import seen_of
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.driver.control_socket import ControlError, Request, ask

PAUSE_S = 1.0
_FIRST_S = 0.2
_ASK_S = 2.0
_ANSWER_S = 10.0
_MOST_VIEWERS = 32
_BEAT_S = 15.0


class TooManyViewers(Exception):
    """More pages are open than the server keeps up to date."""


class LiveRun:
    """A run, and the content of its page. `sections`: makes the sections of the report."""

    def __init__(self, run: RunDirectory, sections: Sections) -> None:
        self.run = run
        self.follower = Follower(run.path)
        self.actions = Actions(run, self._changed)
        self.status: RunStatus = "running"
        self.answer: Mapping[str, Any] | None = None
        self.report = b"null"  # JSON of the report's sections, once they exist
        self.report_number = -1  # the number of the report's latest build, from 0
        self.problem: str | None = None  # an error of the folder
        self.report_problem: str | None = None
        self.num_viewers = 0
        self.looked = 0
        self._sections = sections
        self._news = asyncio.Condition()
        self._someone = asyncio.Event()
        self._number = 0
        self._dirty = asyncio.Event()
        self._message = b""
        self._ask_after = 0.0
        self._answer_problem: str | None = None
        self._report_after = 0.0
        self._reported = -1  # the follower's change count at the last whole report
        self._reporting: asyncio.Task[None] | None = None

    def _changed(self) -> None:
        self._dirty.set()

    async def keep(self) -> None:
        """Look, notify the viewers and pause, until cancelled."""
        try:
            await self._keep()
        finally:
            await cancel([self._reporting] if self._reporting else [])

    async def _keep(self) -> None:
        while True:
            await self._someone.wait()
            took = await self.look()
            rest = max(PAUSE_S, FRUGAL * took if self.looked > 1 else 0.0)
            # Not wait_for: up to Python 3.11 it loses a cancellation that comes with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._dirty.wait()
            self._dirty.clear()

    async def look(self) -> float:
        """Read new data, query the run's status, and notify the viewers. Returns the processor time of this look."""
        self.looked += 1
        took, began = 0.0, time.thread_time()  # excludes work for others during waits
        told, patience = time.monotonic(), PAUSE_S if self.looked > 1 else _FIRST_S
        try:
            for step, _ in enumerate(self.follower.poll()):
                took += time.thread_time() - began
                if step == 0:  # by now the summary has been read, if it exists
                    await self._ask()
                    self._begin_report()
                await asyncio.sleep(0)
                began = time.thread_time()
                if time.monotonic() - told > patience:  # the first look at a long run takes a while
                    await self._tell()
                    told = time.monotonic()
            self.problem = self.follower.problem
        except OSError as error:
            self.problem = f"the run's folder cannot be read: {error.strerror or error} ({error.filename})"
        except Exception as error:  # noqa: BLE001 (a run folder may hold anything: the page reports it)
            self.problem = f"the run's folder cannot be read: {type(error).__name__}: {error}"
        await self._tell()
        took += time.thread_time() - began
        self._begin_report()
        return took

    def _begin_report(self) -> None:
        """Start making the report's sections in the background, if they are due."""
        due = self._reported != self.follower.changes and time.monotonic() >= self._report_after
        if due and self._reporting is None:
            self._reporting = asyncio.create_task(self._make_report())

    async def _ask(self) -> None:
        follower, run = self.follower, self.run
        updates = follower.updates
        last = updates.column("finished", 1)[-1] if len(updates) else 0.0
        self.status = run_status(run, follower.summary, follower.attempts, float(last))
        if self.status != "running":
            self.answer = None
        elif time.monotonic() >= self._ask_after:
            began = time.monotonic()
            try:
                self.answer = await in_daemon_thread(lambda: _answer_of(run))
                self._answer_problem = None
            except (ControlError, OSError):
                self.answer = None
            except msgspec.ValidationError as error:
                self.answer = None
                self._answer_problem = f"the run's answer cannot be shown: {error}"
            self._ask_after = time.monotonic() + max(_ASK_S, FRUGAL * (time.monotonic() - began))

    async def _make_report(self) -> None:
        changes = self.follower.changes
        try:
            made = await in_daemon_thread(lambda: self._sections.make(self.run))
            self._report_after = time.monotonic() + max(PAUSE_S, FRUGAL * made.took_s if self.report_number >= 0 else 0)
            self.report, self.report_problem = made.content, None
            self.report_number += 1
            self._reported = changes if made.is_whole else -1  # missing parts are due at once
            await self._tell()
        except Exception as error:  # noqa: BLE001 (the page reports it)
            self.report_problem = f"the report's sections cannot be made: {type(error).__name__}: {error}"
            self._report_after = time.monotonic() + 60.0
        finally:
            self._reporting = None

    # ---- notification -----------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        self._message = self.message()
        async with self._news:
            self._number += 1
            self._news.notify_all()

    def message(self) -> bytes:
        """Return the message for viewers, as JSON: the sections that are always live, and the report's build number."""
        told = ((self.answer or {}).get("progress") or {}).get("told")
        seen = seen_of(self.follower, self.status, told and told["text"], time.time())
        actions = self.actions
        now = now_section(self.follower, self.status, self.answer, alerts(seen), actions.recent, actions.doing)
        for problem in filter(None, (self.report_problem, self._answer_problem, self.problem)):
            now["blocks"].insert(0, {"kind": "text", "text": problem, "tone": "warning"})
        run = {"label": self.run.run_id, "id": self.run.run_id, "status": self.status, "colour": 0}
        page = {
            "title": self.run.run_id,
            "version": __version__,
            "made": f"live, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}",
            "runs": [run],
            "sections": [now, self._lanes(), *self._logs()],
        }
        return as_json({"page": page, "report": self.report_number})

    def _lanes(self) -> dict[str, Any]:
        spans = self.follower.spans
        part = f"the newest {len(spans):,} of " if spans.forgotten else ""
        note = f"{part}{len(spans) + spans.forgotten:,} spans" + (
            ", and more are being read" if self.follower.is_behind else ""
        )
        data = {
            "live": True,
            "lanes": spans.lanes(),
            "kinds": spans.kinds,
            "start": 0.0,
            "end": round(spans.end - spans.start, 3),
            "first": 60,
            "note": f"{note}. Times are seconds since the first span.",
        }
        blocks: list[dict[str, Any]] = [
            {"kind": "lanes", "id": "lanes-live", "title": "Lanes", "hint": HINT, "data": data}
        ]
        if not len(spans):
            blocks = [{"kind": "text", "text": "No spans yet.", "tone": "nothing"}]
        return {"id": "lanes", "title": "What every worker does", "lead": "", "blocks": blocks, "tabs": []}

    def _logs(self) -> list[dict[str, Any]]:
        """Return the section with the logs, which the page requests one by one; empty for a run without any."""
        if not (names := [*logs_of(self.run)]):
            return []
        block = {"kind": "logs", "id": "logs-live", "title": "Printed by a worker", "workers": names}
        return [{"id": "logs", "title": "Logs", "lead": "", "blocks": [block], "tabs": []}]

    async def messages(self) -> AsyncGenerator[bytes]:
        """Yield messages, only the newest if a viewer is slow, and b"" every `_BEAT_S` seconds without news.

        Raises TooManyViewers."""
        if self.num_viewers >= _MOST_VIEWERS:
            raise TooManyViewers
        self.num_viewers += 1
        self._someone.set()
        self._dirty.set()  # a new viewer sees the current state immediately
        seen = self._number
        try:
            if self._message:
                yield self._message
            while True:
                try:
                    async with asyncio.timeout(_BEAT_S), self._news:
                        await self._news.wait_for(lambda: self._number != seen)  # noqa: B023 (awaited here)
                    seen = self._number
                    yield self._message
                except TimeoutError:
                    yield b""
        finally:
            self.num_viewers -= 1
            if not self.num_viewers:
                self._someone.clear()


def _answer_of(run: RunDirectory) -> dict[str, Any]:
    """Query the run. Raises ControlError or OSError, and msgspec.ValidationError for an answer of another shape."""
    answer = ask(run.control, Request(), _ANSWER_S)
    require_answer(answer)
    return answer
