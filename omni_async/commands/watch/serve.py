"""Serves the live pages of a run or of a folder of runs: builds its parts, listens, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from omni_async.aio.threads import in_daemon_thread
from omni_async.commands.watch.app import WatchApp
from omni_async.commands.watch.guard import Guard
from omni_async.commands.watch.lives import Lives
from omni_async.rewards.server.connections import IDLE_S, listen
from omni_async.rewards.server.listener import address_of, listening

_GRACE_S = 1.0
_MOST_CONNECTIONS = 256


@contextlib.asynccontextmanager
async def serving(
    folder: Path, host: str, port: int, token: str | None, is_one: bool = True
) -> AsyncIterator[tuple[str, str]]:
    """Serve the page of a run during the block; yield its address and the key for buttons.

    `is_one`: whether `folder` is the run's; otherwise a page lists all runs in it.

    Raises ConfigError if it cannot listen there."""
    guard = Guard(host, token)
    lives = Lives(folder, is_one)
    runner = web.AppRunner(
        WatchApp(lives, guard).app(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=_GRACE_S,
    )
    accepting: asyncio.Server | None = None
    try:
        await runner.setup()
        bound = await in_daemon_thread(listening, host, port, "--port")
        accepting = await listen(runner, bound, _MOST_CONNECTIONS)
        yield address_of(bound), guard.key
    finally:
        if accepting is not None:
            accepting.close()
        await lives.close()
        await runner.cleanup()
