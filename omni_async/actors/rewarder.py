"""The reward worker: scores samples the moment they are generated, in batches of whatever is there.

Waits for a generated sample (`starved`); unblocked by a producer's `samples_done` or a retried score. The scorer runs in a thread of its
own, off the event loop. A batch that fails is scored again one by one, so that one bad sample does not take its neighbours along; what still
fails is reported as an error, never as a number.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from omni_async.actors.api import CoordinatorApi
from omni_async.actors.tracer import Tracer
from omni_async.config import Config
from omni_async.control.clock import Clock
from omni_async.rewards.base import ScoreError, Scorer
from omni_async.store import ObjectLost, ObjectStore
from omni_async.types import Score, ScoreJob, ScoreResult


class Rewarder:
    def __init__(self, name: str, config: Config, scorer: Scorer, coordinator: CoordinatorApi, store: ObjectStore, clock: Clock) -> None:
        self.name = name
        self._config = config
        self._scorer = scorer
        self._coordinator = coordinator
        self._store = store
        self._clock = clock
        self._tracer = Tracer(name, coordinator, clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def start(self) -> None:
        """The scorer was built with its models loaded; nothing else to do."""

    async def run(self) -> None:
        flusher = asyncio.create_task(self._tracer.flush_every(1.0))
        try:
            jobs = await self._next_jobs()
            while jobs:
                results = await self._score_all(jobs)
                # Told and asked at once: one message's time between two batches instead of two.
                _, jobs = await asyncio.gather(self._report(jobs, results), self._next_jobs())
        finally:
            flusher.cancel()
            await asyncio.gather(flusher, return_exceptions=True)
            await self._tracer.flush()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def leave(self) -> None:
        """Take no more samples, and end when those under way are scored."""
        await self._coordinator.scorer_leaves(self.name)

    async def _report(self, jobs: list[ScoreJob], results: list[ScoreResult]) -> None:
        await self._coordinator.scored(self.name, {job.sample_id: job.kind for job in jobs}, results)

    async def _next_jobs(self) -> list[ScoreJob]:
        with self._tracer.span("starved"):
            return await self._coordinator.next_to_score(self.name, self._config.reward.batch)

    async def _score_all(self, jobs: list[ScoreJob]) -> list[ScoreResult]:
        try:
            with self._tracer.span("score", samples=len(jobs)):
                scores = await self._score(jobs)
            return [ScoreResult(job.sample_id, job.attempt, score=score) for job, score in zip(jobs, scores, strict=True)]
        except Exception as error:  # noqa: BLE001 (a scorer is foreign code; its failure is the sample's, not the worker's)
            if len(jobs) == 1:
                # Scorers raise ScoreError and whatever they like, the store alone raises ObjectLost.
                gone, why = isinstance(error, ObjectLost), f"{type(error).__name__}: {error}"
                return [ScoreResult(jobs[0].sample_id, jobs[0].attempt, error=why, gone=gone)]
        return [result for job in jobs for result in await self._score_all([job])]

    async def _score(self, jobs: list[ScoreJob]) -> list[Score]:
        try:
            async with asyncio.timeout(self._config.reward.timeout_s) as deadline:
                pictures = await asyncio.gather(*(self._store.get(job.media) for job in jobs))
                prompts = [job.prompt for job in jobs]
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._scorer.score, pictures, prompts)
        except TimeoutError:
            if not deadline.expired():
                raise  # the scorer's own, of a socket perhaps
            # The thread cannot be stopped: leave it behind, and give the next batch a thread that answers.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)
            raise ScoreError(f"no score within {self._config.reward.timeout_s} s") from None
