"""Runs the reward worker: takes samples as they are generated, and calls all scorers of each concurrently.

Waits for a generated sample (`starved`); unblocked by a producer's result or a retried score. A request for samples
carries the answers about earlier ones; while it waits, answers have their own calls. It takes as many
samples as its scorers could start now; scorers without a concurrency limit take all available samples. While a scorer
is down it takes no samples and waits for the scorer (`outage`); unblocked by its answer, by `reward.outage_s`, or by
the end of the run. A failure is reported as an error, never as a number. Scorers that block run in threads, off the
event loop; `omni_async.rewards.health` documents how they may fail.

Before the worker takes its first sample, its scorers score a synthetic one: a scorer that is simply wrong ends the run
then, while engines still load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import asdict

from omni_async.aio.clock import Clock
from omni_async.aio.waiting import Event, Outbox, cancel, first_of
from omni_async.config import Config
from omni_async.media import Media
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.roles.api import CoordinatorForRewarder, Tracer
from omni_async.store import ObjectLost, ObjectStore
from omni_async.types import Answer, ScoreJob, ScoreResult

# How long a worker's start waits for the first answer of its scorers. Later answers also count, until the first sample
# is taken.
_START_S = 30.0
# Spans and counts leave with other calls; these are the seconds between calls for them alone, of an idle worker.
_FLUSH_S = 10.0


@dataclass(eq=False)
class Rewarder:
    """The reward worker. `probe`: the sample that the scorers are tried with at the start; None: no trial."""

    name: str
    config: Config
    reward: LoadedReward
    coordinator: CoordinatorForRewarder
    store: ObjectStore
    clock: Clock
    probe: Probe | None = None

    def __post_init__(self) -> None:
        self._panel = Panel(
            self.name,
            self.reward,
            self.config.reward,
            self.clock,
            self.coordinator.phase,
            probe=self.probe,
            observe=self._record_call,
            addresses=KnownAddresses(self.config.reward, self.coordinator.addresses),
        )
        self._tracer = Tracer(self.name, self.coordinator, self.clock, _FLUSH_S, self._panel.take_reports)
        self._trial: asyncio.Task[str | None] | None = None
        self._scoring: set[asyncio.Task[None]] = set()
        self._fetching = 0  # samples that have not reached any scorer yet
        self._changed = Event()  # a sample is done, so there may be room for another
        self._results: Outbox[ScoreResult] = Outbox(self._hand_in)

    async def start(self) -> None:
        """Try the scorers, whose models are already loaded. Raises WrongScorer if their failure has ended the run."""
        self._trial = asyncio.create_task(self._try_out())
        try:
            await asyncio.wait({self._trial}, timeout=_START_S)
        except asyncio.CancelledError:
            self._trial.cancel()
            raise
        if self._trial.done() and (wrong := self._trial.result()) is not None:
            await self._panel.close()
            raise WrongScorer(wrong)

    async def _try_out(self) -> str | None:
        """Return why the run has ended, if the scorers are wrong."""
        wrong = await self._panel.try_out()
        return wrong if wrong is not None and await self.coordinator.scorer_wrong(wrong) else None

    async def run(self) -> None:
        """Score until the run ends; discard scores still pending then. Raises ScorerHangs if it needs a replacement."""
        async with self._tracer.task_group() as tasks:
            try:
                await first_of(self._work(tasks), self.coordinator.closing())
            finally:
                await cancel(self._scoring)
                await self._panel.close()

    async def leave(self) -> None:
        """Take no more samples, and end once the current samples are scored."""
        await self.coordinator.scorer_leaves(self.name)

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        if self._trial is not None and await self._trial is not None:
            return
        while True:
            attempt = await self._scorers_are_up()
            room = self._panel.room(self._fetching)
            if not room:
                await self._changed.wait()
                continue
            with self._tracer.span("starved"):
                jobs = await self._results.carry(partial(self._next_jobs, room))
            if not jobs:
                break
            if jobs[0].alone:
                await self._all_scored()
            self._fetching += len(jobs)
            task = tasks.create_task(self._score_all(jobs))
            self._scoring.add(task)
            task.add_done_callback(self._scored)
            if attempt or jobs[0].alone:
                await self._all_scored()
        await self._all_scored()

    async def _next_jobs(self, room: int, done: list[ScoreResult]) -> list[ScoreJob]:
        return await self.coordinator.next_to_score(self.name, room, done, self._tracer.take())

    async def _scorers_are_up(self) -> bool:
        """Wait for scorers that are down. Return whether a scorer still is, so that one sample has to test it."""
        if self._panel.down:
            with self._tracer.span("outage"):
                await self._panel.recover()
        return self._panel.down

    def _scored(self, task: asyncio.Task[None]) -> None:
        self._scoring.discard(task)
        self._changed.notify()

    async def _all_scored(self) -> None:
        while self._scoring:
            await self._changed.wait()

    async def _score_all(self, jobs: list[ScoreJob]) -> None:
        """Score samples of one lease concurrently, so that they may share batches; report each separately."""
        try:
            media = await asyncio.gather(*(self._media(job) for job in jobs))
        finally:
            self._fetching -= len(jobs)
        await asyncio.gather(*map(self._score, jobs, media))

    async def _score(self, job: ScoreJob, media: Media | Answer) -> None:
        answer = media if isinstance(media, Answer) else await self._answer(job, media)
        self._changed.notify()
        await self._results.send(ScoreResult(job.sample_id, job.attempt, **asdict(answer)))

    async def _answer(self, job: ScoreJob, media: Media) -> Answer:
        return await self._panel.score(media, job.prompt, (job.sample_id, job.attempt))

    async def _hand_in(self, results: list[ScoreResult]) -> None:
        await self.coordinator.scored(self.name, results, self._tracer.take())

    async def _media(self, job: ScoreJob) -> Media | Answer:
        """Fetch the job's media. Missing media are no evidence against the scorers."""
        timeout_s = self.config.reward.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                media: Media = await self.store.get(job.media)
                return media
        except TimeoutError:
            return Answer(error=f"its media did not arrive within {timeout_s:g} s")
        except ObjectLost as error:
            return Answer(error=str(error), fault="replace")
        except Exception as error:  # noqa: BLE001 (the sample's trouble, not the worker's)
            return Answer(error=f"{type(error).__name__}: {error}")

    def _record_call(self, scorer: str, prompts: Sequence[int], start: float, end: float) -> None:
        self._tracer.add("score", start, end, samples=len(prompts), scorer=scorer, prompts=sorted({*prompts}))
