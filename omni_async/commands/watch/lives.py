"""Holds the runs that a server shows: one run, or the runs of a folder. A run is kept up to date once it is opened."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import cancel
from omni_async.commands.emulated import emulated_run
from omni_async.commands.watch.live import LiveRun
from omni_async.commands.watch.report_sections import Sections
from omni_async.records.read.run_list import list_runs
from omni_async.records.write.rundir import RunDirectory
from omni_async.rewards.server.limits import Refused

_MOST_OPEN = 8  # runs of a folder that are kept up to date at once
_NAME = r"[\w.-]{1,200}"


class Lives:
    """The run in `folder` or, unless `is_one`, the runs below it. `prefix`: of the paths of a run's page."""

    def __init__(self, folder: Path, is_one: bool) -> None:
        self._folder = folder
        self.is_one = is_one
        self.prefix = "" if self.is_one else f"/{{run:{_NAME}}}"
        self._open: OrderedDict[str, tuple[LiveRun, asyncio.Task[None]]] = OrderedDict()
        if self.is_one:
            self._keep(folder.name, folder)

    def _keep(self, name: str, folder: Path) -> LiveRun:
        live = LiveRun(RunDirectory(folder), Sections())
        self._open[name] = live, asyncio.create_task(live.keep(), name=f"keep the page of {name} up to date")
        return live

    async def of(self, request: web.Request) -> LiveRun:
        """Return the run that a request is about. Raises Refused if there is none, or too many are open."""
        name = self._folder.name if self.is_one else request.match_info["run"]
        if name not in self._open:
            folder = await in_daemon_thread(self._find, name)
            if folder is None:
                raise Refused(404, "there is no such run")
            if name not in self._open:
                await self._make_room()
                self._keep(name, folder)
        self._open.move_to_end(name)
        return self._open[name][0]

    def _find(self, name: str) -> Path | None:
        """Return the run folder of that name; a name of a request is never joined to a path."""
        found = (path for path in self._folder.iterdir() if path.name == name)
        return next((path for path in found if (path / "config.yaml").is_file()), None)

    async def _make_room(self) -> None:
        """Close the run that was asked for longest ago and has no viewer, if many are open."""
        if len(self._open) < _MOST_OPEN:
            return
        idle = next((name for name, (live, _) in self._open.items() if not live.num_viewers), None)
        if idle is None:
            raise Refused(503, f"{_MOST_OPEN} runs are open already", 10.0)
        _, keeping = self._open.pop(idle)
        await cancel({keeping})

    async def listed(self) -> list[dict[str, Any]]:
        """Return the runs of the folder, the newest first, and whether each is `emulated`. Raises OSError."""
        return await in_daemon_thread(self._list)

    def _list(self) -> list[dict[str, Any]]:
        found = list_runs(self._folder)
        return [{**msgspec.structs.asdict(one), "emulated": bool(emulated_run(Path(one.path)))} for one in found]

    def rest(self, path: str) -> str:
        """Return a request's path within its page, without the leading slash."""
        _, slash, rest = path[1:].partition("/")
        return rest if slash and not self.is_one else path[1:]

    async def close(self) -> None:
        """Stop keeping the runs up to date."""
        await cancel({keeping for _, keeping in self._open.values()})
