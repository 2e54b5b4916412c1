"""Scores the samples of all requests: waits for samples and for scorers that are down, in one task per worker.

As reward workers do, a worker takes waiting samples of any requests, as many as its scorers can begin. Its scorers have
the same time-outs and retries as in reward workers. While every worker's scorer is down, new requests and waiting
samples are refused at once, because clients retry.

A sample that is repeated while it waits or is scored, or soon after, gets the same outcome without being scored again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from omni_async.aio.clock import WallClock
from omni_async.aio.waiting import Event, FairQueue, Stopped, cancel, unless
from omni_async.config.reward import Reward
from omni_async.control.reward_formula import RewardFormula
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import Addresses
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.rewards.server.metrics import Metrics
from omni_async.rewards.wire import Outcome, kind_of
from omni_async.types import Answer, Prompt

_ENDING = "the server is ending"


class NotNow(RuntimeError):
    """The samples cannot be accepted now: too many wait, or the scorers are down."""


@dataclass(eq=False)
class _Job:
    media: Media
    prompt: Prompt
    outcome: asyncio.Future[Outcome]


class Scoring:
    """All workers of a server. `async with` runs them; `failed` is done, with its error, when one of them is lost."""

    def __init__(
        self,
        reward: Reward,
        scorers: Sequence[LoadedReward],
        metrics: Metrics,
        tell: Callable[[str], None],
        *,
        most_waiting: int,
        remembered: int,
        addresses: Addresses | None = None,
    ) -> None:
        async def report(text: str) -> None:
            tell(text)

        clock, addresses = WallClock(), addresses or KnownAddresses(reward, None)
        self._panels = [
            Panel(
                f"scorer-{i}",
                one,
                reward,
                clock,
                report,
                observe=lambda _, prompts, start, end: metrics.scored(len(prompts), end - start),
                addresses=addresses,
            )
            for i, one in enumerate(scorers)
        ]
        asked = (registry.prompt_check(one) for one in reward.scorers)
        self._checks = [*filter(None, asked), RewardFormula(reward).missing]
        self._metrics = metrics
        self._most_waiting = most_waiting
        self._remembered = remembered
        self._known: OrderedDict[str, asyncio.Future[Outcome]] = OrderedDict()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by client; the client whose turn is next first
        self._queue = FairQueue(lambda: bool(self._waiting))
        self._num_down = 0
        self._workers: list[asyncio.Task[None]] = []
        metrics.waiting.set_function(self._num_waiting)
        metrics.up.set_function(lambda: float(not self.down))

    async def __aenter__(self) -> Scoring:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._workers = [asyncio.create_task(self._work(panel)) for panel in self._panels]
        for worker in self._workers:
            worker.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._workers)
        await asyncio.gather(*(panel.close() for panel in self._panels))
        self._fail_waiting(_ENDING)
        self.failed.cancel()

    @property
    def down(self) -> str:
        """Why nothing can be scored now; empty if something can."""
        if self.failed.done():
            return _ENDING
        if self._num_down < len(self._panels):
            return ""
        return next((reason for panel in self._panels for reason in panel.outages), "the scorers are down")

    async def score(self, samples: Sequence[tuple[str | None, Media, Prompt]], client: str = "") -> list[Outcome]:
        """Return one outcome per sample: (key, media, prompt). Raises NotNow if none of them can be accepted.

        A client gets half of the places, or the places of one request; clients take turns."""
        if reason := self.down:
            raise NotNow(reason)
        if (waiting := self._num_waiting()) + len(samples) > self._most_waiting:
            raise NotNow(f"{waiting} samples wait already")
        own = len(self._waiting.get(client, ()))
        if own and own + len(samples) > self._most_waiting // 2:
            raise NotNow(f"{own} samples of this client wait already")
        outcomes = [self._outcome(client, *sample) for sample in samples]
        self._queue.notify()
        await asyncio.wait(outcomes)  # not gathered: a client that disconnects must not cancel the outcomes of others
        return [outcome.result() for outcome in outcomes]

    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _outcome(self, client: str, key: str | None, media: Media, prompt: Prompt) -> asyncio.Future[Outcome]:
        """Return the future outcome of a sample, which is queued unless its outcome is known."""
        if key is not None and (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self._metrics.samples.labels("remembered").inc()
            return known
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if missing := next(filter(None, (check(prompt) for check in self._checks)), None):
            outcome.set_result(Outcome(error=missing))
            self._metrics.samples.labels("failed").inc()
            return outcome
        self._waiting.setdefault(client, deque()).append(_Job(media, prompt, outcome))
        if key is not None:
            self._remember(key, outcome)
        return outcome

    def _remember(self, key: str, outcome: asyncio.Future[Outcome]) -> None:
        self._known[key] = outcome
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)

        def forget_failure(done: asyncio.Future[Outcome]) -> None:
            if done.result().error is not None and self._known.get(key) is done:
                del self._known[key]

        outcome.add_done_callback(forget_failure)

    async def _work(self, panel: Panel) -> None:
        changed = Event()
        async with asyncio.TaskGroup() as tasks:
            while True:
                if panel.down:
                    await self._recover(panel)
                attempt, room = panel.down, panel.room()
                if not room:
                    await changed.wait()
                    continue
                try:
                    taken = self._queue.take(partial(self._take, room))
                    jobs = await unless(_goes_down(panel, changed), taken)
                except Stopped:
                    continue
                scoring = [tasks.create_task(self._score(panel, job, changed)) for job in jobs]
                if attempt:
                    await asyncio.wait(scoring)
                await asyncio.sleep(0)  # until the samples are in the scorers' queues, and count there

    async def _score(self, panel: Panel, job: _Job, changed: Event) -> None:
        try:
            answer = await panel.score(job.media, job.prompt, whole=True)
        except BaseException:  # its request would wait forever
            self._fail([job], _ENDING)
            raise
        self._settle(job, _outcome_of(answer, panel.down))
        changed.notify()

    async def _recover(self, panel: Panel) -> None:
        self._num_down += 1
        try:
            if reason := self.down:
                self._fail_waiting(reason)
            await panel.recover()
        finally:
            self._num_down -= 1

    def _take(self, room: int) -> list[_Job]:
        jobs: list[_Job] = []
        while self._waiting and len(jobs) < room:
            client, own = next(iter(self._waiting.items()))
            jobs.append(own.popleft())
            self._waiting.move_to_end(client)
            if not own:
                del self._waiting[client]
        return jobs

    def _settle(self, job: _Job, outcome: Outcome) -> None:
        self._metrics.samples.labels("scored" if outcome.error is None else "failed").inc()
        job.outcome.set_result(outcome)

    def _fail_waiting(self, reason: str) -> None:
        waiting = self._take(self._num_waiting())
        self._fail(waiting, reason)

    def _fail(self, jobs: Sequence[_Job], reason: str) -> None:
        for job in jobs:
            self._settle(job, Outcome(error=reason, kind="outage"))

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """Record the loss of a worker: its scorer hangs, and only the end of the process stops its threads."""
        if not worker.cancelled() and not self.failed.done():
            error = worker.exception() or RuntimeError("a worker ended")
            self.failed.set_exception(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)
            self._fail_waiting(_ENDING)


async def _goes_down(panel: Panel, changed: Event) -> None:
    """Return when a scorer that was up goes down."""
    was_down = panel.down
    while was_down or not panel.down:
        await changed.wait()


def _outcome_of(answer: Answer, down: bool) -> Outcome:
    if answer.score is None:
        return Outcome(error=answer.error, kind="outage" if down else kind_of(answer.fault))
    return Outcome(value=answer.score.value, parts=answer.score.parts, text=answer.score.text)
