"""Runs a reward server until a signal or a hanging scorer ends it.

At the end it stops listening, and waits `server.grace_s` for the requests in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from omni_async.aio.threads import in_daemon_thread
from omni_async.config import ConfigError
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.registry import ScorerConfigError
from omni_async.rewards.server.connections import IDLE_S, listen
from omni_async.rewards.server.listener import address_of, end_signal, listening
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import Scoring
from omni_async.rewards.server.server import RewardApp
from omni_async.rewards.server.settings import Server, ServerConfig, token_of

Tell = Callable[[str], None]

_LINGER_S = 2.0  # for the rest of a body that was refused unread


@contextlib.asynccontextmanager
async def serving(config: ServerConfig, tell: Tell) -> AsyncIterator[tuple[str, Scoring]]:
    """Load the scorers and serve them inside; yields the address and the workers. Raises ConfigError if that fails."""
    server, token = config.server, token_of(config.server)
    try:
        gpus = config.placement.reward.gpus
        scorers = [LoadedReward.load(config.reward, gpus) for _ in range(config.reward.workers)]
    except (WrongScorer, ScorerConfigError) as error:
        raise ConfigError(f"reward.scorers: {error}") from None
    metrics = Metrics()
    reward = config.reward
    if reward.cache.path is None:  # the server remembers recent scores already
        reward = replace(reward, cache=replace(reward.cache, memory=0))
    scoring = Scoring(reward, scorers, metrics, tell, most_waiting=server.max_waiting, remembered=server.remembered)
    async with scoring:
        routes = RewardApp(server, token, scoring, metrics, tell)
        async with answering(server, {"": routes}) as address:
            yield address, scoring


@contextlib.asynccontextmanager
async def answering(server: Server, routes: Mapping[str, RewardApp]) -> AsyncIterator[str]:
    """Answer HTTP inside, with the routes below each path; yields the address. ConfigError if it cannot listen."""
    # aiohttp logs each request that is not HTTP with its traceback: strangers could fill the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = web.Application()
    for path, one in routes.items():
        if path:
            app.add_subapp(path, one.app())
        else:
            app = one.app()
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        lingering_time=_LINGER_S,
        shutdown_timeout=server.grace_s,
    )
    await runner.setup()
    accepting: asyncio.Server | None = None
    try:
        bound = await in_daemon_thread(listening, server.host, server.port, "server.port")
        accepting = await listen(runner, bound, server.max_connections)
        yield address_of(bound)
    finally:
        for one in routes.values():
            one.ending = True
        if accepting is not None:
            accepting.close()
        await runner.cleanup()


async def serve(config: ServerConfig, say: Tell, tell: Tell) -> int:
    """Serve until SIGTERM (returns 0), Ctrl-C (130) or a scorer's end (1).

    Args:
        config: of `load_server`.
        say: gets the address, once the server answers there.
        tell: gets messages about scorers."""
    async with serving(config, tell) as (address, scoring):
        stopping = end_signal()
        say(f"serving {', '.join(scorer.name for scorer in config.reward.scorers)} at {address}")
        ends: set[asyncio.Future[Any]] = {stopping, scoring.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not scoring.failed.done():
            return stopping.result()
        tell(f"the server ends: {scoring.failed.exception()}")
        return 1
