"""Runs a worker of `reward.pools`: a reward server for each scorer of the pool, on one port, as a service of the run.

Reward workers find it by its address, which contains its token, and call it like any reward server. A lost worker is
replaced, at another address. Waits for requests, and as documented in `omni_async.rewards.server.scoring`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from msgspec.structs import replace

from omni_async.aio.threads import in_daemon_thread
from omni_async.config import Config
from omni_async.config import reward as sections
from omni_async.plugins.services import Service, ServiceSite
from omni_async.rewards.functions import receive
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.pooled import path_in_pool, scorers_of
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.server.scoring import Scoring
from omni_async.rewards.server.serve import answering
from omni_async.rewards.server.server import RewardApp
from omni_async.rewards.server.settings import Server
from omni_async.roles.builders import ServiceHost, WorkerContext

_TOKEN_BYTES = 32


def build(context: WorkerContext) -> ServiceHost:
    """Build the worker in its process; its scorers are loaded when it starts."""
    pool = next(pool for pool in context.config.reward.pools if pool.name == context.worker.role)
    context.limit_threads(pool.resources.cpus)
    receive(context.inputs.passed)
    return ServiceHost(context.name, PoolService(context.service_site(), pool), context.coordinator)


class PoolService(Service):
    """A worker of a pool. It only answers clients that have its address from `start`, which contains its token."""

    def __init__(self, site: ServiceSite, pool: sections.Pool) -> None:
        self._site = site
        self._pool = pool
        self._open = contextlib.AsyncExitStack()
        self._tells = set[asyncio.Future[None]]()
        self._ended = asyncio.Event()
        self._scorings: list[Scoring] = []

    async def start(self) -> str:
        config, token = self._site.config, secrets.token_urlsafe(_TOKEN_BYTES)
        # Every client has the token, and a run has at most as many samples as its buffers hold.
        server = Server(
            host=self._site.host,
            port=0,
            max_held="2GiB",
            max_connections=100_000,
            max_waiting=100_000,
            requests_per_s=1e6,
            burst=1_000_000,
        )
        routes = {}
        for number, scorer in enumerate(scorers_of(config.reward, self._pool.name)):
            reward = _alone(config, scorer)
            loaded = await in_daemon_thread(LoadedReward.load, reward, self._pool.resources.gpus)
            metrics = Metrics()
            scoring = Scoring(
                reward,
                [loaded],
                metrics,
                self._tell,
                most_waiting=server.max_waiting,
                remembered=server.remembered,
                addresses=KnownAddresses(config.reward, self._site.addresses),
            )
            self._scorings.append(await self._open.enter_async_context(scoring))
            routes[path_in_pool(number)] = RewardApp(server, token, scoring, metrics, self._tell)
        address = await self._open.enter_async_context(answering(server, routes))
        return address.replace("://", f"://:{token}@", 1)

    async def run(self) -> None:
        """Serve until cancelled, or until a scorer hangs for good, and then raise its error."""
        await asyncio.wait([scoring.failed for scoring in self._scorings], return_when=asyncio.FIRST_COMPLETED)
        for scoring in self._scorings:
            if scoring.failed.done():
                scoring.failed.result()

    async def close(self) -> None:
        await self._open.aclose()

    def _tell(self, text: str) -> None:
        task = asyncio.ensure_future(self._site.tell(f"{self._site.name}: {text}"))
        self._tells.add(task)
        task.add_done_callback(self._tells.discard)


def _alone(config: Config, scorer: sections.Scorer) -> sections.Reward:
    """Return a reward whose value is the scorer's own: the run decides how much it counts."""
    own = replace(scorer, weight=1.0, components={}, gate=None, when={}, on_failure="reject", pool=None)
    return replace(config.reward, scorers=(own,), pools=(), combine="sum", max_abs=1e12)
