"""Defines the Protocols through which roles call each other, and the tracer through which they tell what they did.

A plain object satisfies the Protocols in one process, and a proxy does across Ray actors.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from omni_async.aio.clock import Clock
from omni_async.control.control_state import ControlState
from omni_async.types import (
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
    from omni_async.weights.snapshot import SharedRows, Snapshot

# Waits shorter than this are scheduling, not starvation, and would only fatten the trace.
_SHORTEST_WAIT_S = 0.001


class CoordinatorApi(Protocol):
    """The coordinator as the other roles call it; `omni_async.control.coordinator` says what each call waits for."""

    async def next_samples(self, engine: str, free: int, capacity: int) -> list[SampleRequest]: ...
    async def samples_done(self, engine: str, results: list[SampleResult]) -> None: ...
    async def sample_failed(self, engine: str, sample_id: str, error: str) -> None: ...
    async def next_to_score(self, worker: str, limit: int) -> list[ScoreJob]: ...
    async def scored(self, worker: str, results: list[ScoreResult]) -> None: ...
    async def closing(self) -> None: ...
    async def require_fields(self, fields: tuple[str, ...]) -> None: ...
    async def next_groups(self, version: int, needed: int) -> list[ReadyGroup]: ...
    async def update_done(self, report: UpdateReport) -> bool: ...
    async def announce(self, version: int, digest: str) -> None: ...
    async def engine_holds(self, report: WeightReport) -> None: ...
    async def report_spans(self, spans: list[Span]) -> None: ...
    async def report_scorers(self, worker: str, reports: list[ScorerReport]) -> None: ...
    async def phase(self, text: str) -> None: ...
    async def continuation(self) -> ControlState: ...
    async def take_up(self, groups: list[ReadyGroup]) -> None: ...
    async def group_gone(self, group: int, reason: str) -> None: ...
    async def engine_joins(self, engine: str) -> None: ...
    async def engine_lost(self, engine: str, reason: str) -> None: ...
    async def engine_leaves(self, engine: str) -> None: ...
    async def scorer_wrong(self, reason: str) -> bool: ...
    async def scorer_lost(self, worker: str) -> None: ...
    async def scorer_leaves(self, worker: str) -> None: ...
    async def objects_lost(self, engine: str) -> None: ...
    async def service_ready(self, worker: str, address: str) -> None: ...
    async def service_lost(self, worker: str) -> None: ...
    async def addresses(self, role: str) -> dict[str, str]: ...


class ProducerApi(Protocol):
    """The calls of the publisher to a producer.

    `invitation` and `parcel` are the weight transport's own: its sender makes them, the producer's receiver understands
    them."""

    async def join_weights(self, invitation: Any) -> None: ...
    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport: ...


class RankApi(Protocol):
    """One trainer rank. Every call is made on all ranks, in the same order: each may hold a collective.

    `export` returns as soon as this rank's rows of the weights are copied out (on rank 0, which lives in the trainer's
    process; None elsewhere): the trainer waits for it and for nothing else of a publish. `Snapshot` and its digest need
    no torch."""

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        """Join the other ranks, and load the model, and the checkpoint `resume` if there is one.

        The ranks join the store at `rendezvous` (`tcp://host:port`), which is served already; None: one rank."""

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        """Return the drifts of the group's samples that this rank was dealt, in their order."""

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None: ...
    async def step(self, grad_scale: float) -> dict[str, float]: ...
    async def discard(self) -> None: ...
    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        """Read this rank's share of a group before anything is computed with it, and keep it for this update.

        Args:
            group: The group's number.
            trajectories: References to all its trained samples.
            start: Samples of the update's groups before it, after which the deal goes on.

        Raises:
            ObjectLost: The share is gone.
        """

    async def export(self, version: int) -> Snapshot | None: ...
    async def share(self, version: int) -> SharedRows:
        """Put the rows that another rank than 0 exported as `version` into the run's store.

        Once for each export of a rank that holds a part of the first copy of the weights; no collective, and beside
        everything else."""

    async def begin_save(self, folder: str) -> dict[str, Any]:
        """Copy out what a checkpoint holds of this rank, and write it into `folder` from then on; return the rest."""

    async def end_save(self) -> None:
        """Wait until the files of `begin_save` are written."""


class Abandoned(Exception):
    """An update was given up before it changed anything."""


class PolicyUpdate(Protocol):
    """One update while it is made: give it `missing` groups with `add`, then `finish`."""

    groups: list[ReadyGroup]

    @property
    def missing(self) -> int:
        """Return the number of groups that are still missing."""

    async def add(self, group: ReadyGroup) -> None: ...

    async def finish(self) -> dict[str, float]:
        """Compute what is left and return the update's metrics. Abandoned if it is to be given up and can be."""


class UpdateRule(Protocol):
    """The way the trainer turns groups into updates, and its state from one update to the next (for checkpoints)."""

    def begin(self, version: int, tracer: Tracer, preempt: Callable[[], bool]) -> PolicyUpdate:
        """Begin an update.

        Args:
            version: the policy version that it trains from.
            tracer: where its spans are recorded.
            preempt: returns whether to give the update up if it has not changed the weights yet."""

    def learn(self, metrics: dict[str, float]) -> str | None:
        """Take an update's metrics into account, once it is made.

        Returns a sentence for the console if they decide how later updates are made, else None."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Tracer:
    """A record of an actor's spans, handed to the coordinator in batches, for the timeline and the busy fractions.

    `report` hands over what else the actor has counted, as often."""

    def __init__(
        self,
        actor: str,
        coordinator: CoordinatorApi,
        clock: Clock,
        report: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.actor = actor
        self._report = report
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
        """Record a span that has ended, unless it is a wait of less than a millisecond.

        Args:
            kind: as `Span` lists them.
            start: in the clock's seconds.
            end: likewise.
            args: facts to show with it, such as `version`."""
        self.seconds[kind] += end - start
        if kind not in ("starved", "backpressured") or end - start >= _SHORTEST_WAIT_S:
            self._spans.append(Span(self.actor, kind, start, end, args))

    async def flush(self) -> None:
        if self._spans:
            spans, self._spans = self._spans, []
            await self._coordinator.report_spans(spans)
        if self._report is not None:
            await self._report()

    @asynccontextmanager
    async def task_group(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Own the tasks of an actor, whose spans are handed over every second while they run, and when they have ended.

        One failure is enough to end them all, and to say why: the first comes out, without a group around it. That
        spans could not be handed over is said at the end: a checkpoint being written is not broken off for them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                flusher = tasks.create_task(self._flush_while_it_works(1.0))
                yield tasks
                flusher.cancel()
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        finally:
            await self.flush()

    async def _flush_while_it_works(self, seconds: float) -> None:
        with suppress(Exception):  # the last flush raises it
            await self.flush_every(seconds)

    async def flush_every(self, seconds: float) -> None:
        """Flush every `seconds` until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            await self.flush()
