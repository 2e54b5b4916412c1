"""Serves the live page of one run: builds its parts, listens, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import cancel
from omni_async.commands.watch.app import WatchApp
from omni_async.commands.watch.guard import Guard
from omni_async.commands.watch.live import LiveRun
from omni_async.commands.watch.report_sections import Sections
from omni_async.records.write.rundir import RunDirectory
from omni_async.rewards.server.connections import IDLE_S, listen
from omni_async.rewards.server.listener import address_of, listening

_GRACE_S = 1.0
_MOST_CONNECTIONS = 256


@contextlib.asynccontextmanager
async def serving(folder: Path, host: str, port: int, token: str | None) -> AsyncIterator[tuple[str, str]]:
    """Serve the page of a run during the block; yield its address and the key for buttons.

    Raises ConfigError if it cannot listen there."""
    guard = Guard(host, token)
    live = LiveRun(RunDirectory(folder), Sections())
    runner = web.AppRunner(
        WatchApp(live, guard).app(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=_GRACE_S,
    )
    await runner.setup()
    bound = await in_daemon_thread(listening, host, port, "--port")
    keeping = asyncio.create_task(live.keep(), name="keep the page up to date")
    accepting: asyncio.Server | None = None
    try:
        accepting = await listen(runner, bound, _MOST_CONNECTIONS)
        yield address_of(bound), guard.key
    finally:
        if accepting is not None:
            accepting.close()
        await cancel({keeping})
        await runner.cleanup()
