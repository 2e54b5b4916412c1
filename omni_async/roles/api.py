"""Defines the Protocols through which roles call each other, and the tracer through which they report their spans.

Plain objects satisfy the Protocols in one process, and proxies do across Ray actors.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from omni_async.aio.clock import Clock
from omni_async.control.control_state import ControlState
from omni_async.types import (
    Activity,
    ReadyGroup,
    SampleDrift,
    SampleRequest,
    SampleResult,
    ScoreJob,
    ScoreResult,
    ScorerReport,
    Span,
    TrainGroup,
    UpdateReport,
    WeightManifest,
    WeightReport,
)

if TYPE_CHECKING:
    from omni_async.roles.plan import Plan
    from omni_async.weights.snapshot import SharedRows, Snapshot

# Shorter waits are scheduling, not starvation, and would only enlarge the trace.
_SHORTEST_WAIT_S = 0.001
_TICK_S = 1.0


# ---- the coordinator, for each of its callers ------------------------------------------------------------------------

# `omni_async.control.coordinator` documents the calls, and what each waits for.


class ActivitySink(Protocol):
    """The coordinator's call for every tracer."""

    async def report(self, worker: str, activity: Activity) -> None: ...


class LeaseSource(Protocol):
    """The coordinator's calls about samples to generate. `done` and `activity` are taken before the wait."""

    async def next_samples(
        self, engine: str, free: int, capacity: int, done: Sequence[SampleResult] = (), activity: Activity | None = None
    ) -> list[SampleRequest]: ...
    async def samples_done(
        self, engine: str, results: Sequence[SampleResult], activity: Activity | None = None
    ) -> None: ...
    async def sample_failed(self, engine: str, sample_id: str, error: str) -> None: ...


class JobSource(Protocol):
    """The coordinator's calls about samples to score. `done` and `activity` are taken before the wait."""

    async def next_to_score(
        self, worker: str, limit: int, done: Sequence[ScoreResult] = (), activity: Activity | None = None
    ) -> list[ScoreJob]: ...
    async def scored(self, worker: str, results: Sequence[ScoreResult], activity: Activity | None = None) -> None: ...


class CoordinatorForProducer(LeaseSource, ActivitySink, Protocol):
    """The coordinator's calls for a producer."""

    async def engine_leaves(self, engine: str) -> None: ...
    async def scorer_wrong(self, reason: str) -> bool: ...
    async def phase(self, text: str) -> None: ...
    async def closing(self) -> None: ...


class CoordinatorForRewarder(JobSource, ActivitySink, Protocol):
    """The coordinator's calls for a reward worker."""

    async def scorer_wrong(self, reason: str) -> bool: ...
    async def scorer_leaves(self, worker: str) -> None: ...
    async def addresses(self, role: str) -> dict[str, str]: ...
    async def phase(self, text: str) -> None: ...
    async def closing(self) -> None: ...


class CoordinatorForReader(LeaseSource, JobSource, ActivitySink, Protocol):
    """The coordinator's calls for a preference reader."""


class CoordinatorForCheckpointer(Protocol):
    """The coordinator's calls for the trainer's checkpoints."""

    async def continuation(self) -> ControlState: ...
    async def take_up(self, groups: list[ReadyGroup]) -> None: ...
    async def phase(self, text: str) -> None: ...


class CoordinatorForPublisher(ActivitySink, Protocol):
    """The coordinator's calls for the weight publisher."""

    async def announce(self, version: int, digest: str) -> None: ...
    async def engine_holds(self, report: WeightReport) -> None: ...
    async def engine_lost(self, engine: str, reason: str) -> None: ...


class CoordinatorForTrainer(CoordinatorForCheckpointer, ActivitySink, Protocol):
    """The coordinator's calls for the trainer; without engines it publishes versions itself."""

    async def require_fields(self, fields: tuple[str, ...]) -> None: ...
    async def trainer_collects(self, collects: bool) -> None: ...
    async def next_groups(self, version: int, needed: int) -> list[ReadyGroup]: ...
    async def update_done(self, report: UpdateReport) -> bool: ...
    async def group_gone(self, group: int, reason: str) -> None: ...
    async def announce(self, version: int, digest: str) -> None: ...
    async def engine_holds(self, report: WeightReport) -> None: ...


class CoordinatorForService(Protocol):
    """The coordinator's calls for the host of a service."""

    async def service_ready(self, worker: str, address: str) -> None: ...
    async def service_lost(self, worker: str) -> None: ...
    async def closing(self) -> None: ...


class CoordinatorForRoles(
    CoordinatorForProducer,
    CoordinatorForRewarder,
    CoordinatorForReader,
    CoordinatorForPublisher,
    CoordinatorForTrainer,
    CoordinatorForService,
    Protocol,
):
    """The coordinator as the builders pass it to every role."""


# ---- other roles -----------------------------------------------------------------------------------------------------


class ProducerApi(Protocol):
    """The calls of the publisher to a producer.

    `membership` and `transfer` belong to the weight transport: its sender creates them, the producer's receiver reads
    them."""

    async def join_weights(self, membership: Any) -> None: ...
    async def receive_weights(self, manifest: WeightManifest, transfer: Any) -> WeightReport: ...


class RankApi(Protocol):
    """One trainer rank. Every call is made on all ranks, in the same order: each may contain a collective.

    `export` returns as soon as this rank's rows of the weights are copied out (on rank 0, which lives in the trainer's
    process; None elsewhere): the trainer waits for no other part of a publish. `Snapshot` and its digest need no
    torch."""

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        """Join the other ranks, and load the model and any checkpoint `resume`.

        The ranks join the store that is already served at `rendezvous` (`tcp://host:port`); None: one rank."""

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        """Run a forward pass over this rank's share of a group, and return its samples' drifts, in their order.

        Without `batch.weighed` nothing reads the drifts, and the list is empty."""

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None: ...
    async def step(self, grad_scale: float) -> dict[str, float]: ...
    async def discard(self) -> None: ...
    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        """Read this rank's share of a group before anything is computed with it, and keep it for this update.

        Args:
            group: the group's number.
            trajectories: references to all its trained samples.
            start: number of samples in the update's earlier groups; the deal to ranks continues after them.

        Raises:
            ObjectLost: the share is gone."""

    async def export(self, version: int) -> Snapshot | None: ...
    async def share(self, version: int) -> SharedRows:
        """Put the rows that another rank than 0 exported as `version` into the run's store.

        Called once per export on each rank that holds a part of the first copy of the weights. Not collective; runs
        concurrently with everything else."""

    async def begin_save(self, folder: str) -> dict[str, Any]:
        """Copy this rank's checkpoint tensors, write them into `folder` in the background, and return other state."""

    async def end_save(self) -> None:
        """Wait until the files of `begin_save` are written."""


class Abandoned(Exception):
    """An update was abandoned before it changed anything."""


class PolicyUpdate(Protocol):
    """One update in progress: pass it `missing` groups with `add`, then call `finish`."""

    groups: list[ReadyGroup]

    @property
    def missing(self) -> int:
        """Return the number of missing groups."""

    async def add(self, group: ReadyGroup) -> None: ...

    async def finish(self) -> dict[str, float]:
        """Compute the rest and return the metrics. Raises Abandoned if preempted before the weights have changed."""


class UpdateRule(Protocol):
    """The rule that turns groups into updates, and its state from one update to the next (for checkpoints).

    plan: how the next update is carried out; `learn` and `restore` may change it."""

    plan: Plan

    def begin(self, version: int, tracer: Tracer, preempt: Callable[[], bool]) -> PolicyUpdate:
        """Begin an update.

        Args:
            version: the policy version that it trains from.
            tracer: records its spans.
            preempt: returns whether to abandon the update if it has not changed the weights yet."""

    def learn(self, metrics: dict[str, float]) -> str | None:
        """Process the metrics of a finished update.

        Returns a sentence for the console if they determine how later updates are made, otherwise None."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Tracer:
    """A record of an actor's spans, sent to the coordinator in batches, for the timeline and the busy fractions.

    An actor with other calls sends it with them (`take`); after `flush_s` seconds without such a call it is sent alone.
    `scorers` returns the counts of a reward worker's scorers since it was last called: every second, because the
    samples in flight are averaged over these counts."""

    def __init__(
        self,
        actor: str,
        coordinator: ActivitySink,
        clock: Clock,
        flush_s: float = 1.0,
        scorers: Callable[[], list[ScorerReport]] = list,
    ) -> None:
        self.actor = actor
        self._flush_s = flush_s
        self._scorers = scorers
        self._counts: list[ScorerReport] = []
        self._quiet_s = 0.0  # since activity was taken
        self._coordinator = coordinator
        self._clock = clock
        self._spans: list[Span] = []
        self.seconds: dict[str, float] = defaultdict(float)  # of all spans so far, by kind

    @contextmanager
    def span(self, kind: str, **args: Any) -> Iterator[None]:
        start = self._clock.now()
        try:
            yield
        finally:
            self.add(kind, start, self._clock.now(), **args)

    def add(self, kind: str, start: float, end: float, **args: Any) -> None:
        """Record a finished span, unless it is a wait of less than a millisecond.

        Args:
            kind: one of those listed in `Span`.
            start: in the clock's seconds.
            end: in the clock's seconds.
            args: facts to show with it, such as `version`."""
        self.seconds[kind] += end - start
        if kind not in ("starved", "backpressured") or end - start >= _SHORTEST_WAIT_S:
            self._spans.append(Span(self.actor, kind, start, end, args))

    def take(self) -> Activity | None:
        """Return the activity to send with a call that is made now, if any."""
        spans, self._spans = self._spans, []
        counts, self._counts = self._counts, []
        self._quiet_s = 0.0
        return Activity(spans, counts) if spans or counts else None

    async def flush(self) -> None:
        if (activity := self.take()) is not None:
            await self._coordinator.report(self.actor, activity)

    @asynccontextmanager
    async def task_group(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Own an actor's tasks; send their spans regularly while they run, and when they have ended.

        The first failure cancels all tasks and is raised without a group around it. A failure to send spans is raised
        at the end: it must not interrupt a checkpoint that is being written."""
        try:
            async with asyncio.TaskGroup() as tasks:
                flusher = tasks.create_task(self._flush_while_it_works())
                yield tasks
                flusher.cancel()
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        finally:
            self._counts += self._scorers()
            await self.flush()

    async def _flush_while_it_works(self) -> None:
        with suppress(Exception):  # the last flush raises it
            await self.flush_when_quiet(self._flush_s)

    async def flush_when_quiet(self, seconds: float) -> None:
        """Flush after `seconds` without a `take`, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._counts += self._scorers()
            self._quiet_s += _TICK_S
            if self._quiet_s >= seconds:
                await self.flush()
