"""Runs the reward worker: scores samples the moment they are generated, in batches of those that are there.

Waits for a generated sample (`starved`); unblocked by a producer's `samples_done` or a retried score. While a scorer is
down it asks for no samples and waits for the scorer (`outage`); unblocked by its answer, by `reward.outage_s`, or by
the end of the run. What fails is reported as an error, never as a number. Scorers run in threads, off the event loop;
see `omni_async.rewards.guard` for how they may fail.

Before the worker asks for the first sample, its scorers score a synthetic one: a scorer that is simply wrong ends the
run then, while engines still load.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from omni_async.actors.api import CoordinatorApi, Tracer
from omni_async.aio.clock import Clock
from omni_async.aio.waiting import first_of
from omni_async.config import Config
from omni_async.media import Media
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.guard import Failure
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.store import ObjectLost, ObjectStore
from omni_async.types import Score, ScoreJob, ScoreResult

# How long the start of a worker waits for its scorers' first answer. Later answers count too, before the first sample
# is asked for.
_START_S = 30.0


@dataclass(eq=False)
class Rewarder:
    """The reward worker. `probe`: the sample that the scorers are tried with at the start; None: none."""

    name: str
    config: Config
    reward: WeightedScorer
    coordinator: CoordinatorApi
    store: ObjectStore
    clock: Clock
    probe: Probe | None = None

    def __post_init__(self) -> None:
        config, report = self.config.reward, self.coordinator.phase
        self._panel = Panel(self.name, self.reward, config, self.clock, report, probe=self.probe)
        self._trial: asyncio.Task[str | None] | None = None
        self._tracer = Tracer(self.name, self.coordinator, self.clock)

    async def start(self) -> None:
        """Try the scorers, which were built with their models loaded. WrongScorer if that has ended the run."""
        self._trial = asyncio.create_task(self._try_out())
        try:
            await asyncio.wait({self._trial}, timeout=_START_S)
        except asyncio.CancelledError:
            self._trial.cancel()
            raise
        if self._trial.done() and (wrong := self._trial.result()) is not None:
            self._panel.close()
            raise WrongScorer(wrong)

    async def _try_out(self) -> str | None:
        """Return why the run is over, if the scorers are wrong."""
        wrong = await self._panel.try_out()
        return wrong if wrong is not None and await self.coordinator.scorer_wrong(wrong) else None

    async def run(self) -> None:
        """Score until the run is over, whose last scores nobody needs. ScorerHangs if a worker has to take over."""
        async with self._tracer.task_group():
            try:
                await first_of(self._work(), self.coordinator.closing())
            finally:
                self._panel.close()

    async def leave(self) -> None:
        """Take no more samples, and ends when those under way are scored."""
        await self.coordinator.scorer_leaves(self.name)

    async def _work(self) -> None:
        if self._trial is not None and await self._trial is not None:
            return
        jobs = await self._next_jobs()
        while jobs:
            results = await self._score_all(jobs)
            # Reported and asked at once: one message's time between two batches instead of two.
            _, jobs = await asyncio.gather(self.coordinator.scored(self.name, results), self._next_jobs())

    async def _next_jobs(self) -> list[ScoreJob]:
        if self._panel.down:
            with self._tracer.span("outage"):
                await self._panel.recover()
        with self._tracer.span("starved"):
            return await self.coordinator.next_to_score(self.name, self.config.reward.batch)

    async def _score_all(self, jobs: list[ScoreJob]) -> list[ScoreResult]:
        with self._tracer.span("score", samples=len(jobs)):
            media = await self._fetch(jobs)
            found = [(job, one) for job, one in zip(jobs, media, strict=True) if not isinstance(one, Failure)]
            outcomes = await self._score([one for _, one in found], [job for job, _ in found])
            hits = self._panel.take_hits()
            scored = iter([(outcome, hits[i]) for i, outcome in enumerate(outcomes)])
            return [
                _result(job, *((one, 0) if isinstance(one, Failure) else next(scored)))
                for job, one in zip(jobs, media, strict=True)
            ]

    async def _fetch(self, jobs: list[ScoreJob]) -> list[Media | Failure]:
        """Fetch each job's media. If they are missing, that says nothing about the scorers."""
        return await asyncio.gather(*(self._media(job) for job in jobs))

    async def _score(self, media: list[Media], jobs: list[ScoreJob]) -> list[Score | Failure]:
        return await self._panel.score(media, [job.prompt for job in jobs])

    async def _media(self, job: ScoreJob) -> Media | Failure:
        timeout_s = self.config.reward.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                media: Media = await self.store.get(job.media)
                return media
        except TimeoutError:
            return Failure(f"its media did not arrive within {timeout_s:g} s")
        except ObjectLost as error:
            return Failure(str(error), "replace")
        except Exception as error:  # noqa: BLE001 (the sample's trouble, not the worker's)
            return Failure(f"{type(error).__name__}: {error}")


def _result(job: ScoreJob, outcome: Score | Failure, cached: int) -> ScoreResult:
    if isinstance(outcome, Failure):
        error, fault, wrong = outcome.reason, outcome.fault, outcome.wrong
        return ScoreResult(job.sample_id, job.attempt, error=error, fault=fault, wrong=wrong)
    return ScoreResult(job.sample_id, job.attempt, score=outcome, cached=cached)
