"""The world of the live page: a run's folder, a job that answers at its control socket, and the page's server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from omni_async.commands.watch.guard import KEY_HEADER
from omni_async.commands.watch.serve import serving
from omni_async.records.write.rundir import RunDirectory
from omni_async.runtime.driver.control_socket import ControlSocket, Request, Tell
from tests.support.made_run import MadeRun

TOKEN = "a token that is long enough"


class RunningJob:
    """A job that has locked its folder and answers there. `asked`: what it was asked to change."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        self.asked: list[Request] = []
        self.stops = 0
        self.workers = {"rollout": 2, "reward": 1}
        self.may_scale = asyncio.Event()
        self.may_scale.set()

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[RunningJob]:
        self.run._claim()
        try:
            async with ControlSocket(self.run.control) as control:
                control.answer = self._answer
                control.stop = self._stop
                yield self
        finally:
            self.run.release()

    def _stop(self) -> None:
        self.stops += 1

    async def _answer(self, request: Request, tell: Tell) -> dict[str, Any]:
        if request.scale:
            if "rollout" in request.scale and request.scale["rollout"] > 100:
                raise ValueError("scale: rollout: there are no 100 devices")
            tell("waiting for rollout-2 to load")
            await self.may_scale.wait()
            self.asked.append(request)
            self.workers |= request.scale
        parts = {f"{role}-{n}": {"pid": 100 + n} for role, count in self.workers.items() for n in range(count)}
        return {
            "parts": {**parts, "trainer": {"pid": 99}},
            "engines": {name: 3 for name in parts if name.startswith("rollout")},
            "addresses": {},
            "faults": 0,
            "conservation": {"admitted": 40, "trained": 30, "rejected": 2, "dropped": 0, "live": 8},
            "reasons": {"zero reward variance": 2},
            "drop_reasons": {},
            "devices": [
                {
                    **{"number": 0, "node": "local", "workers": ["rollout-0", "trainer"]},
                    "device": {
                        **{"id": "GPU-0", "name": "NVIDIA H100", "utilisation": 0.97},
                        **{"memory_bytes": 41 * 2**30, "total_bytes": 80 * 2**30},
                    },
                }
            ],
            "buffers": {
                "slots": {"capacity": 12, "live": 8, "awaiting_publication": 0},
                "trajectories": {"capacity": 96, "reserved": 60, "ready": 4},
                "bytes": {"capacity": None, "reserved": 2_000_000, "ready": 1_000_000, "most": 1_500_000},
            },
            "progress": {"update": 4, "updates": 100, "eta_s": 90.0, "reward": 0.51, "told": None, "validation": None},
        }


@dataclass
class Page:
    """An open live page."""

    address: str
    key: str
    client: aiohttp.ClientSession
    folder: Path
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    @property
    def own(self) -> dict[str, str]:
        """Returns the headers that the page itself sends with what it asks to change."""
        return {"Origin": self.address, KEY_HEADER: self.key}

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.client.get(f"{self.address}{path}", headers=headers, allow_redirects=False) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def post(self, path: str, body: Any, **headers: str | None) -> tuple[int, Any]:
        """Posts as the page does, with these headers changed; None: without it."""
        all_ = {name: value for name, value in {**self.own, **headers}.items() if value is not None}
        async with self.client.post(f"{self.address}{path}", json=body, headers=all_) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def watched(folder: Path, token: str | None = None, groups: int = 40) -> AsyncIterator[Page]:
    """Serves the page of a run that never was."""
    if not (folder / "ledger.jsonl").exists():
        MadeRun(groups=groups).write(folder)
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses, too
    async with (
        serving(folder, "127.0.0.1", 0, token) as (address, key),
        aiohttp.ClientSession(cookie_jar=jar) as client,
    ):
        yield Page(address, key, client, folder)
