"""Moves samples from request to score: queued, leased to an engine, generated, being scored. Pure bookkeeping but for
two waits.

| call    | made for      | waits for                              | unblocked by                                     |
|---------|---------------|----------------------------------------|--------------------------------------------------|
| `lease` | a producer    | a queued sample and a slot             | `add`, calls that free a slot (`release`,        |
|         |               | for a trajectory                       | `forget`), `engine_leaves`, `_lost`              |
| `jobs`  | reward worker | a generated sample that may be scored  | `generated`, `answered`, `forget`, a timer,      |
|         |               |                                        | `scorer_leaves`, `_lost`                         |

A sample holds its slot in the trajectory buffer from its lease to its score. With `reward.streaming: false` training
samples may be scored when none is at an engine and none could be: none is queued, or no slot is free. A full buffer is
therefore emptied, and nothing waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable
from functools import partial

from omni_async.aio.backoff import Backoff, Later
from omni_async.aio.waiting import FairQueue
from omni_async.config import Config
from omni_async.control.buffer import BufferStatistics, TrajectoryBuffer
from omni_async.control.leasing import WorkQueue
from omni_async.types import SampleRequest, ScoreJob


class SampleFlow:
    def __init__(self, config: Config) -> None:
        self._streaming = config.reward.streaming
        self._slots = config.buffer.trajectories
        self._engines: set[str] = set()  # those that share the work
        self._lost_scorers: set[str] = set()
        self._queue = WorkQueue(config.validation.share if config.validation else 1.0)
        self._buffer = TrajectoryBuffer(config.buffer.trajectories)
        self._producers = FairQueue(self._may_lease)
        self._rewarders = FairQueue(self._may_score)
        self._backoff = Backoff(config.reward.backoff_s, config.reward.backoff_max_s)
        self._retries = Later()
        self._closed = False

    # ---- generation --------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[SampleRequest]) -> None:
        for request in requests:
            self._queue.add(request)
        self._producers.notify()

    def lease(self, engine: str, free: int, capacity: int) -> Awaitable[list[SampleRequest]]:
        """Leases up to `free` samples to an engine that holds `capacity` at most; none when closed."""
        return self._producers.take(lambda: self._lease(engine, free, capacity), engine)

    def _may_lease(self) -> bool:
        return self._closed or (self._queue.waiting and self._buffer.free > 0)

    def _lease(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        if self._closed or engine not in self._engines:
            return []
        engines = len(self._engines)
        capacity = min(capacity, math.ceil(self._slots / engines))
        leased = self._queue.lease(engine, min(free, self._buffer.free), capacity, engines)
        for request in leased:
            self._buffer.reserve(request.sample_id)
        return leased

    def engine_joins(self, engine: str) -> None:
        self._engines.add(engine)

    def engine_leaves(self, engine: str) -> None:
        """Stops leases to the engine, a waiting one included; it answers for those it has."""
        self._engines.discard(engine)
        self._producers.evict(engine)

    def engine_lost(self, engine: str) -> list[str]:
        """Stops leases to the engine, a waiting one included. Returns the samples it has not answered for."""
        self._engines.discard(engine)
        self._producers.evict(engine)
        return self._queue.leases_of(engine)

    def answered(self, engine: str, sample_id: str) -> SampleRequest | None:
        """Ends the lease that this answer is for and returns its request; None if the engine holds no such lease (any
        more). The sample keeps its slot."""
        request = self._queue.end_lease(engine, sample_id)
        if not self._streaming:
            self._rewarders.notify()
        return request

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def generated(self, job: ScoreJob) -> None:
        self._buffer.put(job)
        self._rewarders.notify()

    def jobs(self, worker: str, limit: int) -> Awaitable[list[ScoreJob]]:
        """Returns up to `limit` samples for a reward worker to score, as many as there are; none when closed."""
        return self._rewarders.take(lambda: self._jobs(worker, limit), worker)

    def _may_score(self) -> bool:
        return (
            self._closed
            or self._buffer.queued("validation")
            or (self._buffer.queued("train") and self._may_score_training())
        )

    def _may_score_training(self) -> bool:
        if self._streaming:
            return True
        return self._queue.num_training_leases == 0 and (self._queue.num_training == 0 or self._buffer.free == 0)

    def _jobs(self, worker: str, limit: int) -> list[ScoreJob]:
        if self._closed or worker in self._lost_scorers:
            return []
        return self._buffer.take(
            worker, limit, ("validation", "train") if self._may_score_training() else ("validation",)
        )

    def being_scored(self, worker: str, sample_id: str) -> bool:
        """Returns whether this reward worker has the sample and has not answered yet, and the score is still of use."""
        return self._buffer.being_scored(worker, sample_id)

    def scorer_leaves(self, worker: str) -> None:
        """Stops jobs to the reward worker, a waiting call included; it answers for those it has."""
        self._lost_scorers.add(worker)
        self._rewarders.evict(worker)

    def scorer_lost(self, worker: str) -> list[ScoreJob]:
        """Stops jobs to the reward worker, a waiting call included. Returns those it has, which wait for other workers,
        before all that came later."""
        self._lost_scorers.add(worker)
        jobs = self._buffer.jobs_of(worker)
        for job in reversed(jobs):
            self._buffer.retry(job)
        self._rewarders.evict(worker)
        self._rewarders.notify()
        return jobs

    def suspect(self, sample_id: str) -> None:
        """Marks the sample to be scored alone from now on: a reward worker or a scorer went down over a batch with
        it."""
        self._buffer.suspect(sample_id)

    def retry_score(self, job: ScoreJob, failures: int) -> None:
        """Queues the sample again when the pause after `failures` failures is over, before all that came later. It
        keeps its slot meanwhile."""
        self._buffer.put_off(job)
        self._retries.call(job.sample_id, self._backoff.pause_s(failures), partial(self._retry, job))

    def postpone_score(self, job: ScoreJob) -> None:
        """Queues the sample behind all others: a scorer that failed is tried with another sample."""
        self._buffer.put_off(job)
        self._buffer.put(job)
        self._rewarders.notify()

    def _retry(self, job: ScoreJob) -> None:
        self._buffer.retry(job)
        self._rewarders.notify()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def release(self, sample_id: str) -> None:
        """Frees the sample's slot: it was scored, or will not be."""
        self._buffer.release(sample_id)
        self._producers.notify()

    def withdraw(self, sample_id: str) -> None:
        """Removes a sample that was generated and lost, so that it is not scored."""
        self._retries.cancel([sample_id])
        self._buffer.discard({sample_id})
        self._producers.notify()

    def forget(self, group: int, sample_ids: Iterable[str]) -> None:
        """Removes the samples of a group that ended. Leased ones keep their slot until their engine answers; all others
        are gone."""
        self._queue.forget(group)
        gone = {sample_id for sample_id in sample_ids if not self._queue.leased(sample_id)}
        self._retries.cancel(gone)
        self._buffer.discard(gone)
        self._producers.notify()
        self._rewarders.notify()

    def leased(self, sample_id: str) -> bool:
        """Returns whether an engine has the sample and has not answered yet."""
        return self._queue.leased(sample_id)

    def close(self) -> None:
        """Ends all waits: the run is over, and every caller gets nothing."""
        self._closed = True
        self._retries.close()
        self._producers.notify()
        self._rewarders.notify()

    def statistics(self) -> BufferStatistics:
        return self._buffer.statistics()
