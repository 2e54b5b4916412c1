"""Records an actor's spans and hands them to the coordinator in batches, for the timeline and the busy fractions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol

from omni_async.aio.clock import Clock
from omni_async.types import Span

# Waits shorter than this are scheduling, not starvation, and would only fatten the trace.
_SHORTEST_WAIT_S = 0.001


class TakesSpans(Protocol):
    """The part of the coordinator that a tracer calls."""

    async def report_spans(self, spans: list[Span]) -> None: ...


class Tracer:
    def __init__(self, actor: str, coordinator: TakesSpans, clock: Clock) -> None:
        self.actor = actor
        self._coordinator = coordinator
        self._clock = clock
        self._spans: list[Span] = []

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
        if kind not in ("starved", "backpressured") or end - start >= _SHORTEST_WAIT_S:
            self._spans.append(Span(self.actor, kind, start, end, args))

    async def flush(self) -> None:
        if self._spans:
            spans, self._spans = self._spans, []
            await self._coordinator.report_spans(spans)

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
